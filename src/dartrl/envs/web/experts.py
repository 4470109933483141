"""Scripted experts that read the page: the next correct action and everything that can be pointed at.

The rules themselves are in `experts.js`, one function of the page per task family; this is the way to ask them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

from dartrl.agent.demonstration import Element, ExpertAction, element_from_json, expert_from_json
from dartrl.envs.web.miniwob import MiniwobEnvironment
from dartrl.errors import ConfigError

EXPERT_SCRIPT = Path(__file__).with_name("experts.js").read_text(encoding="utf-8")
"""Init script of every page that is asked."""

PAGE_SCRIPT = Path(__file__).with_name("synthetic_pages.js").read_text(encoding="utf-8")
"""Init script of pages that are rebuilt at random."""

FAMILIES: tuple[str, ...] = tuple(re.findall(r'^    "([a-z0-9-]+)":', EXPERT_SCRIPT, flags=re.M))
"""Families that have an expert, sorted."""


def require_expert(family: str) -> None:
    """Raises ConfigError if no expert plays the family."""
    if family not in FAMILIES:
        raise ConfigError(f"no scripted expert plays {family!r}; there are experts for {', '.join(FAMILIES)}")


async def look(environment: MiniwobEnvironment, family: str, instruction: str) -> tuple[ExpertAction | None, tuple[Element, ...]]:
    """What the expert would do on the present page (None if it knows no way on), and the elements of the page.

    Raises EnvironmentFault if the script fails in the page.
    """
    arguments = f"{json.dumps(family)}, {json.dumps(instruction)}"
    expression = f"[dartrlExpert.action({arguments}), dartrlExpert.elements()]"
    action, elements = cast(list[Any], await environment.evaluate_js(expression))
    return expert_from_json(action) if action else None, tuple(element_from_json(element) for element in elements)


async def rebuild_page(environment: MiniwobEnvironment, seed: int) -> tuple[bytes, tuple[Element, ...]]:
    """PNG bytes and elements of the synthetic page of a seed, drawn over the running episode's task area."""
    await environment.evaluate_js(f"dartrlSyntheticPage({seed})")
    elements = cast(list[Any], await environment.evaluate_js("dartrlExpert.elements()"))
    return await environment.page.screenshot(), tuple(element_from_json(element) for element in elements)
