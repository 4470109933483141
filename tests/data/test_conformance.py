"""One suite over every store, each promise followed by an audit."""

import pytest

from dartrl.data.audit import audit
from dartrl.testing.store_conformance import LEDGER_CHECKS


@pytest.mark.parametrize("check", LEDGER_CHECKS, ids=lambda check: check.__name__)
def test_ledger_keeps_its_promise(check, bench):
    check(bench)
    if bench.ledger is not None:
        report = audit(bench.ledger)
        assert report.ok, report.problems
