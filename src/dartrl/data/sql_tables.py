"""The tables of `schema.py` in SQLAlchemy: types, keys and indexes for SQLite, MySQL, MariaDB and PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from dartrl.data import schema

METADATA = sa.MetaData()
"""All tables; alembic compares it with a database."""


def _column(name: str, column: schema.Column) -> sa.Column[Any]:
    types: Mapping[schema.Kind, Any] = {
        "text": sa.String(column.size),
        "long_text": sa.Text(),
        "int": sa.BigInteger(),
        "real": sa.Double(),
        "flag": sa.Boolean(),
        "json": sa.JSON(),
        "timestamp": sa.TIMESTAMP(),
    }
    default: Any = None
    if column.default is not None and column.kind in ("text", "int", "real", "flag"):
        default = sa.text(f"'{column.default}'" if column.kind == "text" else str(column.default).lower())
    elif name in ("create_at", "created_at", "updated_at") and column.kind == "timestamp":
        default = sa.func.current_timestamp()
    nullable = not column.required and (default is None or column.kind == "timestamp")
    return sa.Column(name, types[column.kind], nullable=nullable, server_default=default)


def _table(name: str, table: schema.Table) -> sa.Table:
    key = sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True)
    columns = [_column(each, column) for each, column in table.columns.items()]
    keys = [sa.UniqueConstraint(*key, name=f"uq_{name}_{'_'.join(key)}"[:60]) for key in table.unique]
    indexes = [sa.Index(f"ix_{name}_{'_'.join(index)}"[:60], *index) for index in table.indexes]
    return sa.Table(name, METADATA, key, *columns, *keys, *indexes)


SQL_TABLES: Mapping[str, sa.Table] = {name: _table(name, table) for name, table in schema.TABLES.items()}
