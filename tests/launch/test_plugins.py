"""Plug-ins by name: found, unknown, broken."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from dartrl.config import AgentConfig
from dartrl.errors import ConfigError
from dartrl.launch import plugins


def entry(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, plugins.DIALECTS)


def test_an_unknown_name_lists_the_nearest_and_all():
    found = [entry("compact", "a:b"), entry("ui-tars", "a:c")]
    with pytest.raises(ConfigError) as caught:
        plugins.load(plugins.DIALECTS, "ui_tars", found)
    message = str(caught.value)
    assert message.startswith("agent.dialect is 'ui_tars', which is not installed; did you mean 'ui-tars'?")
    assert "installed: compact, ui-tars" in message


def test_a_name_like_no_other_gets_no_guess():
    with pytest.raises(ConfigError) as caught:
        plugins.load(plugins.ENVIRONMENTS, "xyz", [])
    assert "did you mean" not in str(caught.value)
    assert "installed: none" in str(caught.value)


def test_a_plugin_that_cannot_be_imported_is_named():
    with pytest.raises(ConfigError, match=r"its plug-in no\.such:thing cannot be imported"):
        plugins.load(plugins.DIALECTS, "mine", [entry("mine", "no.such:thing")])


def test_the_environments_own_verdict_needs_no_plugin():
    assert plugins.load_reward("environment") is None
    with pytest.raises(ConfigError, match="did you mean 'environment'"):
        plugins.load_reward("enviroment")


@pytest.mark.parametrize("name", ["compact", "ui-tars"])
def test_the_shipped_dialects_are_installed(name: str):
    assert plugins.create_dialect(AgentConfig(dialect=name)).name == name


def test_the_shipped_task_set_is_installed():
    tasks = plugins.create_task_set("miniwob").tasks(("click-test",), "train", 2)
    assert [task.family for task in tasks] == ["click-test"] * 2
