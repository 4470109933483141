"""The ledger in plain dicts: what a store means, and the fast one for tests and simulation.

One lock makes transactions serial; an undo list takes back what a failed one wrote. Indexes are sorted lists of row
ids, so that the oldest or newest of many rows is found without looking at all of them.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from dartrl.data import schema
from dartrl.data.store import Above, AtMost, Increment, Lock, Row, Where
from dartrl.errors import LedgerConflict

Values = tuple[Any, ...]


class MemoryStore:
    """All tables of one process; gone when it ends."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.RLock()
        self._tables = {name: _MemoryTable(name) for name in schema.TABLES}

    @contextmanager
    def transaction(self, *, durable: bool = False) -> Generator[MemoryTransaction]:
        """Serial, all or nothing; `durable` has no meaning in memory."""
        with self._lock:
            transaction = MemoryTransaction(self._tables, self._now())
            try:
                yield transaction
            except BaseException:
                transaction.undo()
                raise

    @contextmanager
    def reading(self) -> Generator[MemoryTransaction]:
        """A consistent view."""
        with self._lock:
            yield MemoryTransaction(self._tables, self._now())

    def close(self) -> None:
        """Nothing to release."""


class MemoryTransaction:
    """Rows under the store's lock."""

    def __init__(self, tables: Mapping[str, _MemoryTable], now: float) -> None:
        self._tables = tables
        self._now = now
        self._undo: list[tuple[_MemoryTable, int, Row | None]] = []

    @property
    def now(self) -> float:
        return self._now

    def insert(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        target = self._tables[table]
        for row in rows:
            row_id = next(target.ids)
            target.add(row_id, {"id": row_id, **schema.complete_row(table, row)})
            self._undo.append((target, row_id, None))

    def select(
        self, table: str, where: Where, *, order: str = "id", descending: bool = False, limit: int | None = None, lock: Lock = ""
    ) -> list[Row]:
        target = self._tables[table]
        if order == "id":
            found = itertools.islice(target.matching(where, descending=descending), limit)
        else:
            found = sorted(target.matching(where), key=lambda row: row[order], reverse=descending)[:limit]
        return [dict(row) for row in found]

    def first(self, table: str, where: Where, *, order: str = "id", descending: bool = False, lock: Lock = "") -> Row | None:
        rows = self.select(table, where, order=order, descending=descending, limit=1)
        return rows[0] if rows else None

    def update(self, table: str, where: Where, changes: Mapping[str, Any]) -> int:
        target = self._tables[table]
        rows = list(target.matching(where))
        for row in rows:
            changed = dict(row)
            for column, value in changes.items():
                changed[column] = row[column] + value.by if isinstance(value, Increment) else value
            self._undo.append((target, row["id"], row))
            target.replace(row["id"], changed)
        return len(rows)

    def tally(self, table: str, where: Where, by: Sequence[str]) -> dict[Values, int]:
        return self._tables[table].tally(where, tuple(by))

    def undo(self) -> None:
        """Take back everything written so far."""
        for target, row_id, before in reversed(self._undo):
            if before is None:
                target.remove(row_id)
            else:
                target.replace(row_id, before)
        self._undo.clear()


class _MemoryTable:
    """Rows of one table with its indexes."""

    def __init__(self, name: str) -> None:
        spec = schema.TABLES[name]
        self.name = name
        self.ids = itertools.count(1)
        self.rows: dict[int, Row] = {}
        self.columns = frozenset(spec.columns) | {"id"}
        self._unique = spec.unique
        self._buckets: dict[tuple[str, ...], dict[Values, list[int]]] = {key: {} for key in (*spec.unique, *spec.indexes)}

    def add(self, row_id: int, row: Row) -> None:
        self._check_unique(row_id, row)
        self.rows[row_id] = row
        for key, buckets in self._buckets.items():
            insort(buckets.setdefault(tuple(row[column] for column in key), []), row_id)

    def remove(self, row_id: int) -> None:
        row = self.rows.pop(row_id)
        for key in self._buckets:
            self._drop(key, tuple(row[column] for column in key), row_id)

    def replace(self, row_id: int, row: Row) -> None:
        self._check_unique(row_id, row)
        before = self.rows[row_id]
        self.rows[row_id] = row
        for key, buckets in self._buckets.items():
            old, new = tuple(before[column] for column in key), tuple(row[column] for column in key)
            if old != new:
                self._drop(key, old, row_id)
                insort(buckets.setdefault(new, []), row_id)

    def matching(self, where: Where, *, descending: bool = False) -> Iterator[Row]:
        """Rows that match, by id; looks only at the rows of the best index."""
        unknown = where.keys() - self.columns
        if unknown:
            raise KeyError(f"table {self.name} has no column {sorted(unknown)}")
        rest = where
        key = self._best_index(where)
        if key is None:
            ids: Iterable[int] = reversed(self.rows) if descending else self.rows
        else:
            ids = _merge(self._lists(key, where), descending=descending)
            rest = {column: condition for column, condition in where.items() if column not in key}
        for row_id in ids:
            row = self.rows[row_id]
            if all(_holds(row[column], condition) for column, condition in rest.items()):
                yield row

    def tally(self, where: Where, by: tuple[str, ...]) -> dict[Values, int]:
        counts: dict[Values, int] = {}
        for key, buckets in self._buckets.items():
            if set(key) == where.keys() | set(by):
                for values, ids in buckets.items():
                    named = dict(zip(key, values, strict=True))
                    if all(_holds(named[column], condition) for column, condition in where.items()):
                        group = tuple(named[column] for column in by)
                        counts[group] = counts.get(group, 0) + len(ids)
                return counts
        for row in self.matching(where):
            group = tuple(row[column] for column in by)
            counts[group] = counts.get(group, 0) + 1
        return counts

    def _check_unique(self, row_id: int, row: Row) -> None:
        for key in self._unique:
            values = tuple(row[column] for column in key)
            if None not in values and any(other != row_id for other in self._buckets[key].get(values, ())):
                raise LedgerConflict(f"table {self.name} already has a row with {dict(zip(key, values, strict=True))}")

    def _best_index(self, where: Where) -> tuple[str, ...] | None:
        exact = {column for column, condition in where.items() if not isinstance(condition, AtMost | Above)}
        usable = [key for key in self._buckets if exact.issuperset(key)]
        return max(usable, key=len, default=None)

    def _lists(self, key: tuple[str, ...], where: Where) -> list[list[int]]:
        """The id lists that the index has for these conditions."""
        options = [condition if isinstance(condition, tuple) else (condition,) for condition in (where[column] for column in key)]
        buckets = self._buckets[key]
        return [buckets[values] for values in itertools.product(*options) if values in buckets]

    def _drop(self, key: tuple[str, ...], values: Values, row_id: int) -> None:
        buckets = self._buckets[key]
        ids = buckets[values]
        del ids[bisect_left(ids, row_id)]
        if not ids:
            del buckets[values]


def _merge(lists: Sequence[list[int]], *, descending: bool) -> Iterable[int]:
    if len(lists) == 1:
        return reversed(lists[0]) if descending else lists[0]
    return heapq.merge(*(reversed(ids) for ids in lists), reverse=True) if descending else heapq.merge(*lists)


def _holds(value: Any, condition: Any) -> bool:
    if isinstance(condition, AtMost):
        return value is not None and value <= condition.value
    if isinstance(condition, Above):
        return value is not None and value > condition.value
    if isinstance(condition, tuple):
        return value in condition
    return value == condition
