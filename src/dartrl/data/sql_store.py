"""The ledger in a SQL database, over the row interface of `store.py`.

SQLite: write-ahead log, BEGIN IMMEDIATE for whoever may write, 30 s busy timeout, synchronous FULL for durable
transactions and NORMAL for others. Servers: READ COMMITTED, row locks, SKIP LOCKED and the server's own time.
Statements are built once for each shape of a call, so that a transaction of ten statements costs about a millisecond.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy import event, exc

from dartrl.data import schema
from dartrl.data.migrations import migrate
from dartrl.data.sql_tables import SQL_TABLES
from dartrl.data.store import Above, AtMost, Increment, Lock, Row, TransactionLost, Where
from dartrl.errors import ConfigError, DartrlError, LedgerConflict

BUSY_TIMEOUT_SECONDS = 30.0
"""Time that a SQLite writer waits for another process."""

Values = tuple[Any, ...]


def open_sql_store(url: str, now: Callable[[], float]) -> SqlStore:
    """The store behind a SQLAlchemy URL, its tables created or migrated.

    now: ledger time for SQLite; servers use their own. Raises ConfigError if the database cannot be used.
    """
    try:
        engine = _create_engine(url)
        migrate(engine)
    except (exc.ArgumentError, exc.NoSuchModuleError) as error:
        raise ConfigError(f"data.database is {url!r}, which is not a SQLAlchemy URL: {error}; such as sqlite:///PATH") from error
    except ModuleNotFoundError as error:
        raise ConfigError(f"data.database needs the driver {error.name}; install it with: pip install {error.name}") from error
    except exc.DBAPIError as error:
        raise ConfigError(f"data.database {_without_password(url)} cannot be opened: {error.orig}") from error
    return SqlStore(engine, now)


class SqlStore:
    """Rows of a SQL database; one connection per transaction, from a pool."""

    def __init__(self, engine: sa.Engine, now: Callable[[], float]) -> None:
        self._engine = engine
        self._now = now
        self._is_sqlite = engine.dialect.name == "sqlite"
        self._statements: dict[Values, Any] = {}
        self._writing = threading.Lock() if self._is_sqlite else nullcontext()

    @contextmanager
    def transaction(self, *, durable: bool = False) -> Generator[SqlTransaction]:
        """May write. Raises LedgerConflict for a second row with a unique key, DartrlError if the database fails."""
        with self._writing, self._connect() as connection:
            if self._is_sqlite:
                _set_synchronous(connection, "FULL" if durable else "NORMAL")
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield SqlTransaction(connection, self._statements, self._clock(connection))

    @contextmanager
    def reading(self) -> Generator[SqlTransaction]:
        """One consistent state; never waits for a writer on SQLite."""
        with self._connect() as connection:
            if self._is_sqlite:
                connection.exec_driver_sql("BEGIN")
            yield SqlTransaction(connection, self._statements, self._clock(connection))

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    @contextmanager
    def _connect(self) -> Generator[sa.Connection]:
        try:
            with self._engine.connect() as connection:
                yield connection
                connection.commit()
        except exc.IntegrityError as error:
            raise LedgerConflict(f"the database refuses a row: {error.orig}") from error
        except exc.OperationalError as error:
            if _is_lost(error):
                raise TransactionLost(f"the database took a transaction back: {error.orig}") from error
            raise DartrlError(
                f"the ledger's database failed: {error.orig}; check that its disk has space and that it can be reached"
            ) from error

    def _clock(self, connection: sa.Connection) -> Callable[[], float]:
        if self._is_sqlite:
            return self._now
        query = {
            "mysql": "SELECT UNIX_TIMESTAMP(SYSDATE(6))",
            "mariadb": "SELECT UNIX_TIMESTAMP(SYSDATE(6))",
            "postgresql": "SELECT EXTRACT(EPOCH FROM clock_timestamp())",
        }[self._engine.dialect.name]
        return lambda: float(connection.exec_driver_sql(query).scalar_one())


class SqlTransaction:
    """Rows of one open transaction."""

    def __init__(self, connection: sa.Connection, statements: dict[Values, Any], clock: Callable[[], float]) -> None:
        self._connection = connection
        self._statements = statements
        self._clock = clock
        self._time: float | None = None

    @property
    def now(self) -> float:
        if self._time is None:
            self._time = self._clock()
        return self._time

    def insert(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            statement = self._statement(("insert", table), lambda: sa.insert(SQL_TABLES[table]))
            self._connection.execute(statement, [schema.complete_row(table, row) for row in rows])

    def select(
        self, table: str, where: Where, *, order: str = "id", descending: bool = False, limit: int | None = None, lock: Lock = ""
    ) -> list[Row]:
        def build() -> Any:
            columns = SQL_TABLES[table].c
            key = columns[order].desc() if descending else columns[order]
            query = (
                sa.select(SQL_TABLES[table]).where(*_clauses(table, where)).order_by(key, *([columns.id] if order != "id" else []))
            )
            if limit is not None:
                query = query.limit(sa.bindparam("row_limit", type_=sa.Integer()))
            if lock and self._connection.dialect.name != "sqlite":
                query = query.with_for_update(skip_locked=lock == "skip")
            return query

        statement = self._statement(("select", table, _shape(where), order, descending, limit is not None, lock), build)
        parameters = _parameters(where) | ({} if limit is None else {"row_limit": limit})
        return [dict(row) for row in self._connection.execute(statement, parameters).mappings()]

    def first(self, table: str, where: Where, *, order: str = "id", descending: bool = False, lock: Lock = "") -> Row | None:
        rows = self.select(table, where, order=order, descending=descending, limit=1, lock=lock)
        return rows[0] if rows else None

    def update(self, table: str, where: Where, changes: Mapping[str, Any]) -> int:
        def build() -> Any:
            target = SQL_TABLES[table]
            values: dict[str, Any] = {}
            for column, value in changes.items():
                parameter = sa.bindparam(f"set_{column}", type_=target.c[column].type)
                values[column] = target.c[column] + parameter if isinstance(value, Increment) else parameter
            return sa.update(target).where(*_clauses(table, where)).values(values)

        kinds = tuple((column, isinstance(value, Increment)) for column, value in changes.items())
        statement = self._statement(("update", table, _shape(where), kinds), build)
        new = {f"set_{column}": value.by if isinstance(value, Increment) else value for column, value in changes.items()}
        return self._connection.execute(statement, _parameters(where) | new).rowcount

    def tally(self, table: str, where: Where, by: Sequence[str]) -> dict[Values, int]:
        def build() -> Any:
            columns = [SQL_TABLES[table].c[name] for name in by]
            return sa.select(*columns, sa.func.count()).where(*_clauses(table, where)).group_by(*columns)

        statement = self._statement(("tally", table, _shape(where), tuple(by)), build)
        return {tuple(row[:-1]): row[-1] for row in self._connection.execute(statement, _parameters(where))}

    def _statement(self, shape: Values, build: Callable[[], Any]) -> Any:
        statement = self._statements.get(shape)
        if statement is None:
            statement = self._statements[shape] = build()
        return statement


def _shape(where: Where) -> Values:
    """What the text of a statement depends on: columns and kinds of conditions, not values."""
    return tuple((column, "null" if condition is None else type(condition).__name__) for column, condition in where.items())


def _clauses(table: str, where: Where) -> list[Any]:
    columns = SQL_TABLES[table].c
    return [_clause(columns[column], condition) for column, condition in where.items()]


def _clause(column: Any, condition: Any) -> Any:
    name = f"where_{column.name}"
    if condition is None:
        return column.is_(None)
    if isinstance(condition, tuple):
        return column.in_(sa.bindparam(name, expanding=True, type_=column.type))
    parameter = sa.bindparam(name, type_=column.type)
    if isinstance(condition, AtMost):
        return column <= parameter
    if isinstance(condition, Above):
        return column > parameter
    return column == parameter


def _parameters(where: Where) -> dict[str, Any]:
    return {f"where_{column}": _value(condition) for column, condition in where.items() if condition is not None}


def _value(condition: Any) -> Any:
    if isinstance(condition, AtMost | Above):
        return condition.value
    return list(condition) if isinstance(condition, tuple) else condition


def _create_engine(url: str) -> sa.Engine:
    json = {"json_serializer": lambda value: orjson.dumps(value).decode(), "json_deserializer": orjson.loads}
    if sa.make_url(url).get_backend_name() != "sqlite":
        return sa.create_engine(url, isolation_level="READ COMMITTED", pool_pre_ping=True, pool_size=16, **json)
    if sa.make_url(url).database in (None, "", ":memory:"):
        raise ConfigError("data.database is SQLite without a file, which processes cannot share; use sqlite:///PATH or memory:")
    engine = sa.create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_SECONDS, "check_same_thread": False}, **json)
    event.listen(engine, "connect", _prepare_sqlite)
    return engine


def _prepare_sqlite(connection: Any, record: Any) -> None:
    """Transactions are begun by us, in the kind we want; readers never block writers."""
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    record.info["synchronous"] = "NORMAL"


def _set_synchronous(connection: sa.Connection, mode: str) -> None:
    if connection.info.get("synchronous") != mode:
        connection.exec_driver_sql(f"PRAGMA synchronous={mode}")
        connection.info["synchronous"] = mode


def _is_lost(error: exc.DBAPIError) -> bool:
    """Deadlock or serialization failure: MySQL and MariaDB 1213 and 1020, SQLSTATE 40001 and 40P01 elsewhere."""
    state = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)
    arguments: Values = getattr(error.orig, "args", ())
    return state in ("40001", "40P01") or (bool(arguments) and arguments[0] in (1213, 1020))


def _without_password(url: str) -> str:
    return sa.make_url(url).render_as_string(hide_password=True)
