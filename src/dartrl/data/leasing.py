"""Leases with heartbeat and fencing token.

A lease past its expiry is still good until somebody takes it away or takes it over: clocks decide only how soon that
happens, the token decides who may write.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from dartrl.data.scope import RunScope
from dartrl.data.states import LEASE, move_one
from dartrl.data.store import Row, Transaction
from dartrl.errors import LeaseLost
from dartrl.records import Lease


def grant_lease(scope: RunScope, transaction: Transaction, *, subject: str, kind: str, holder: str) -> Lease:
    """The first lease on a subject that never had one."""
    lease = Lease(subject, holder, 1, transaction.now + scope.config.data.lease_seconds)
    transaction.insert("lease", [_row(scope, lease, kind)])
    return lease


def take_role(scope: RunScope, transaction: Transaction, kind: str, holder: str) -> Lease | None:
    """The run's lease for a role (trainer, manager), or None while another live holder has it.

    A holder that asks again under its own name was restarted: it gets a larger token at once, and whatever still
    runs under the old one is fenced off.
    """
    subject = f"{kind}:{scope.run_id}"
    scope.run_row(transaction, "wait")
    row = transaction.first("lease", {"subject": subject}, lock="wait")
    if row is None:
        return grant_lease(scope, transaction, subject=subject, kind=kind, holder=holder)
    if row["state"] == "held" and row["holder"] != holder and row["expires_at"] > transaction.now:
        return None
    lease = Lease(subject, holder, row["token"] + 1, transaction.now + scope.config.data.lease_seconds)
    changes = {"holder": holder, "token": lease.token, "expires_at": lease.expires_at}
    move_one(transaction, LEASE, {"subject": subject}, row["state"], "held", changes)
    if row["holder"] != holder or row["expires_at"] <= transaction.now:
        data = {"from": row["holder"], "to": holder, "token": lease.token, "expired_at": row["expires_at"]}
        scope.log(transaction, "takeover", subject, data)
    return lease


def check_lease(transaction: Transaction, lease: Lease) -> Row:
    """The lease's row. Raises LeaseLost if it was taken away, given back or taken over."""
    row = transaction.first("lease", {"subject": lease.subject}, lock="wait")
    if row is None:
        raise LeaseLost(f"there is no lease on {lease.subject}; the ledger never gave one, or belongs to another run")
    if row["state"] != "held":
        raise LeaseLost(f"the lease on {lease.subject} by {lease.holder} is {row['state']}; drop the work")
    if row["token"] != lease.token or row["holder"] != lease.holder:
        raise LeaseLost(
            f"the lease on {lease.subject} by {lease.holder} (token {lease.token}) was taken over by "
            f"{row['holder']} (token {row['token']}); drop the work"
        )
    return row


def renew_leases(scope: RunScope, transaction: Transaction, leases: Sequence[Lease]) -> list[Lease]:
    """Those still held, with a later expiry."""
    if not leases:
        return []
    subjects = tuple({lease.subject for lease in leases})
    rows = transaction.select("lease", {"subject": subjects, "state": "held"}, lock="wait")
    held = {(row["subject"], row["holder"], row["token"]) for row in rows}
    expiry = transaction.now + scope.config.data.lease_seconds
    kept = [lease for lease in leases if (lease.subject, lease.holder, lease.token) in held]
    by_token: defaultdict[int, list[str]] = defaultdict(list)
    for lease in kept:
        by_token[lease.token].append(lease.subject)
    for token, renewed in by_token.items():
        transaction.update("lease", {"subject": tuple(renewed), "state": "held", "token": token}, {"expires_at": expiry})
    return [Lease(lease.subject, lease.holder, lease.token, expiry) for lease in kept]


def end_lease(transaction: Transaction, subject: str, state: str) -> None:
    """The subject's lease becomes released (its work is recorded) or expired (its work is taken away)."""
    move_one(transaction, LEASE, {"subject": subject}, "held", state)


def _row(scope: RunScope, lease: Lease, kind: str) -> Row:
    return {
        "subject": lease.subject,
        "run_id": scope.run_id,
        "kind": kind,
        "state": "held",
        "holder": lease.holder,
        "token": lease.token,
        "expires_at": lease.expires_at,
    }
