"""Steps that bring a database to the present tables, in order; `migrate` runs those that are missing."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

HEAD = "0001"
"""Newest revision; a test compares it with the files in `versions/`."""


def migrate(engine: sa.Engine) -> None:
    """Create or migrate all tables; safe when many processes start at once. Nothing to do costs one query."""
    with engine.connect() as connection:
        if _revision(connection) == HEAD:
            return
    with engine.connect() as connection:
        _lock(connection)
        if _revision(connection) != HEAD:
            _upgrade(connection)
        connection.commit()


def _revision(connection: sa.Connection) -> str | None:
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()


def _lock(connection: sa.Connection) -> None:
    """One process migrates, the others wait here; released with the transaction or the connection."""
    statement = {
        "sqlite": "BEGIN IMMEDIATE",
        "mysql": "SELECT GET_LOCK('dartrl_migrations', 120)",
        "mariadb": "SELECT GET_LOCK('dartrl_migrations', 120)",
        "postgresql": "SELECT pg_advisory_xact_lock(hashtext('dartrl_migrations'))",
    }[connection.dialect.name]
    connection.exec_driver_sql(statement)


def _upgrade(connection: sa.Connection) -> None:
    from alembic import command  # alembic costs a third of a second, so only when there is something to do
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
