"""The small row interface under the data manager: what a store has to do, and nothing about meaning.

A store gives transactions; a transaction reads and writes rows (plain dicts, tables as in `schema.py`) and either
happens as a whole or not at all. Transactions that write are serial in effect: SQLite and memory run one at a time,
server databases lock the rows that are read with `lock`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from dartrl.errors import DartrlError

Row = dict[str, Any]


class TransactionLost(DartrlError):
    """The database took the transaction back by itself, such as for a deadlock; trying again is right."""


@dataclass(frozen=True, slots=True)
class AtMost:
    """Condition: the column is at most this."""

    value: float


@dataclass(frozen=True, slots=True)
class Above:
    """Condition: the column is more than this."""

    value: float


@dataclass(frozen=True, slots=True)
class Increment:
    """Change: add to the present value."""

    by: int = 1


Where = Mapping[str, Any]
"""Column -> value it equals, tuple of which it is one, AtMost or Above; all must hold."""

Lock = Literal["", "wait", "skip"]
"""Row locks on server databases: none, wait for them, or leave out rows that others hold."""


class Transaction(Protocol):
    """All or nothing; used inside `with store.transaction()`."""

    @property
    def now(self) -> float:
        """Ledger time in seconds; the database's own on servers."""
        ...

    def insert(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows, defaults filled in. Raises LedgerConflict if a unique key exists."""
        ...

    def select(
        self, table: str, where: Where, *, order: str = "id", descending: bool = False, limit: int | None = None, lock: Lock = ""
    ) -> list[Row]:
        """Copies of the rows that match, in order."""
        ...

    def first(self, table: str, where: Where, *, order: str = "id", descending: bool = False, lock: Lock = "") -> Row | None:
        """The first row that matches, or None."""
        ...

    def update(self, table: str, where: Where, changes: Mapping[str, Any]) -> int:
        """Change the rows that match; values may be Increment. Returns how many."""
        ...

    def tally(self, table: str, where: Where, by: Sequence[str]) -> dict[tuple[Any, ...], int]:
        """Number of matching rows for each combination of values of the columns `by`."""
        ...


class Store(Protocol):
    """Where the rows live."""

    def transaction(self, *, durable: bool = False) -> AbstractContextManager[Transaction]:
        """A transaction that may write; `durable` survives a loss of power once it has ended."""
        ...

    def reading(self) -> AbstractContextManager[Transaction]:
        """A transaction that only reads, from one consistent state."""
        ...

    def close(self) -> None:
        """Release connections."""
        ...
