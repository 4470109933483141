"""Restart policy, pure; real processes are in test_processes.py and test_faults.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dartrl.launch.supervisor import RestartPolicy, RoleSpec


def test_the_pause_doubles_up_to_its_bound():
    policy = RestartPolicy(first_delay_seconds=0.5, longest_delay_seconds=4.0)
    assert [policy.delay_seconds(failures) for failures in range(1, 7)] == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=30))
def test_only_quick_deaths_in_a_row_add_up(uptimes: list[float]):
    policy = RestartPolicy()
    failures = 0
    for uptime in uptimes:
        failures = policy.count_failures(failures, uptime, exit_status=-9)
    quick = 0
    for uptime in reversed(uptimes):
        quick += 1
        if uptime > policy.healthy_seconds:
            break
    assert failures == quick


def test_giving_up_by_itself_counts_for_longer_than_being_killed():
    policy = RestartPolicy(healthy_seconds=60.0, proven_seconds=600.0)
    assert policy.count_failures(3, 100.0, exit_status=1) == 4
    assert policy.count_failures(3, 100.0, exit_status=-9) == 1
    assert policy.count_failures(3, 700.0, exit_status=1) == 1


def test_a_role_is_named_by_its_number():
    assert RoleSpec("runner", 3).subject == "runner-3"
