"""MiniWoB++ tasks: all pages, disjoint seeds, clear refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dartrl.envs.web.miniwob import page_url
from dartrl.envs.web.pages import UNSTABLE_PAGES
from dartrl.envs.web.task_set import MiniwobTasks
from dartrl.errors import ConfigError
from dartrl.interfaces import TaskSet


def test_all_130_pages_are_tasks():
    families = MiniwobTasks().families()
    assert len(families) == len(set(families)) == 130
    assert isinstance(MiniwobTasks(), TaskSet)
    assert all(page_url(family).endswith(f"/{family}.html") for family in families)


@given(st.integers(0, 500), st.integers(0, 500))
def test_splits_share_no_seed(train, evaluation):
    tasks = MiniwobTasks()
    trained = tasks.tasks(["click-test", "click-pie"], "train", train)
    held_out = tasks.tasks(["click-test"], "evaluation", evaluation)
    assert (len(trained), len(held_out)) == (2 * train, evaluation)
    assert not {task.seed for task in trained} & {task.seed for task in held_out}
    assert len({task.id for task in (*trained, *held_out)}) == 2 * train + evaluation


def test_more_instances_keep_the_first_ones():
    tasks = MiniwobTasks()
    assert tasks.tasks(["click-tab"], "train", 50)[:20] == tasks.tasks(["click-tab"], "train", 20)


def test_an_unknown_family_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'click-test'"):
        MiniwobTasks().tasks(["clik-test"], "train", 1)
    with pytest.raises(ConfigError, match="not one of the 130"):
        page_url("../../etc/passwd")


def test_too_many_instances_are_refused():
    with pytest.raises(ConfigError, match="0 to 100000"):
        MiniwobTasks().tasks(["click-test"], "evaluation", 100_001)


def test_unstable_pages_exist_and_have_reasons():
    assert set(UNSTABLE_PAGES) <= set(MiniwobTasks().families())
