"""When the trainer warns that nothing arrives, and what it names as the cause."""

import pytest

from dartrl.records import Event
from dartrl.train.starvation import FIRST_SECONDS, StarvationWatch


@pytest.fixture
def watch() -> StarvationWatch:
    watch = StarvationWatch(groups_per_step=8)
    watch.reset(1000.0)
    return watch


def test_it_warns_at_doubling_intervals(watch):
    due = [seconds for seconds in range(1, 1000) if watch.is_due(1000.0 + seconds)]
    assert due == [FIRST_SECONDS * factor for factor in (1, 2, 4, 8, 16) if FIRST_SECONDS * factor < 1000]


def test_a_step_resets_it(watch):
    assert watch.is_due(1000.0 + FIRST_SECONDS)
    watch.reset(1100.0)
    assert not watch.is_due(1100.0 + FIRST_SECONDS - 1)
    assert watch.is_due(1100.0 + FIRST_SECONDS)


@pytest.mark.parametrize(
    ("counts", "events", "cause"),
    [
        ({"trajectories_running": 0}, [], "no episode is running"),
        ({"trajectories_running": 5, "groups_open": 2, "groups_rejected": 40}, [], "many groups are rejected"),
        ({"trajectories_running": 5, "groups_open": 2}, [], "slow to finish"),
        (
            {"trajectories_running": 0},
            [Event("alarm", "trainer", {"reason": "starved"}), Event("breaker", "run", {"message": "env_error 60 %"})],
            "last breaker by run: env_error 60 %",
        ),
        ({"trajectories_running": 0}, [Event("alarm", "trainer", {"reason": "starved"})], "no episode is running"),
    ],
)
def test_it_names_counts_and_the_likeliest_cause(watch, counts, events, cause):
    text = watch.explain(1090.0, {"groups_ready": 3, **counts}, events)
    assert text.startswith("no training step for 90 s: 3 of 8 groups ready")
    assert cause in text
