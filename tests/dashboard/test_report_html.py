"""The page stands alone, escapes what others wrote, and marks where the policy pointed."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
from tests.dashboard.test_report import readings

from dartrl.dashboard.charts import Curve, curve_grid
from dartrl.dashboard.report import compute_report
from dartrl.dashboard.report_html import Shown, render_report
from dartrl.testing.images import flat_png
from dartrl.types import Action, ActionKind, End, Generation, Outcome, Step, Task, Trajectory

EVIL = "<script>alert('x')</script>&\"'"


def trajectory() -> Trajectory:
    generation = Generation(
        text=EVIL, prompt_ids=np.zeros(1, np.int32), response_ids=np.zeros(1, np.int32), behaviour_logprobs=np.zeros(1, np.float32),
        entropies=None, finish_reason="stop", image_hashes=(), image_grids=(), fingerprint="f", temperature=1.0, banned_ids=(),
        compute_dtype="float32", weights_version=7, worker="w", request_id="r",
    )  # fmt: skip
    drag = Action(ActionKind.DRAG, x=5, y=6, to_x=7, to_y=8)
    step = Step(0, "h", (56, 28), EVIL, generation, (drag,), None, 0.1, 0.0)
    outcome = Outcome(End.TERMINATED, "environment", score=1.0, success=True)
    return Trajectory("t", Task("a/1", "a", 1), EVIL, (step,), outcome, 0.0, 1.0)


def test_untrusted_text_is_escaped_everywhere():
    shown = [Shown(EVIL, trajectory(), {"h": flat_png(56, 28, 128)}), Shown("without picture", trajectory(), {})]
    report = compute_report(replace(readings(), run_id=EVIL, versions={EVIL: EVIL}))
    page = render_report(report, {}, shown)
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 5


def test_the_page_needs_no_other_file():
    shown = Shown("one", trajectory(), {"h": flat_png(56, 28, 128)})
    page = render_report(compute_report(readings()), {"a": [(1.0, 0.5, 10)]}, [shown])
    assert 'href="data:image/png;base64,' in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "https://" not in page


def test_marks_show_where_the_policy_pointed():
    page = render_report(compute_report(readings()), {}, [Shown("one", trajectory(), {"h": flat_png(56, 28, 128)})])
    assert 'cx="5.0" cy="6.0"' in page and 'x2="7.0" y2="8.0"' in page


def test_charts_are_well_formed_whatever_the_values():
    curves = [
        Curve("a<b", [(0.0, 0.0), (3.0, 2.0), (99.0, -1.0)], before=0.1, after=None, guess=0.5),
        Curve("nothing", []),
    ]
    for minutes in (0.0, 15.0):
        root = ElementTree.fromstring(curve_grid(curves, minutes=minutes))
        points = [element.get("points", "") for element in root.iter() if element.tag.endswith("polyline")]
        assert len(points) == 2
    assert ElementTree.fromstring(curve_grid([], minutes=1.0)) is not None
