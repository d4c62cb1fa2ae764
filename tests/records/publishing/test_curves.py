import re
from typing import Any
from xml.etree import ElementTree

from hybrid_grpo.records.publishing.curves import draw_curves

LINES: list[dict[str, Any]] = [
    {"step": 0, "eval/heldout/accuracy": 0.125, "eval/hard/accuracy": 0.0, "eval/hard/reward_mean": 40.0},
    {"step": 1, "reward/mean": 0.25, "policy/lr": 1e-6},
    {"step": 2, "reward/mean": 0.5, "policy/lr": 1e-6, "eval/heldout/accuracy": 0.75},
    {
        **{"step": 4, "reward/mean": 1.0, "policy/lr": 1e-6},
        **{"eval/heldout/accuracy": 0.625, "eval/hard/accuracy": 0.25, "eval/hard/reward_mean": 30.0},
    },
]


def test_curves_are_the_numbers_of_the_run() -> None:
    picture = draw_curves(LINES)
    assert picture is not None
    root = ElementTree.fromstring(picture)
    space = {"s": "http://www.w3.org/2000/svg"}
    drawn = {}
    for panel in root.findall("s:g", space):
        title, *_ = [text.text for text in panel.findall("s:text", space)]
        lines = [line.attrib["points"].split() for line in panel.findall("s:polyline", space)]
        drawn[title] = [[tuple(map(float, point.split(","))) for point in line] for line in lines]
    # 260 x 120 pixels for four steps and for the range of the values; the learning rate never changes.
    assert drawn["Reward"] == [[(65.0, 120.0), (130.0, 80.0), (260.0, 0.0)]]
    assert drawn["Held-out accuracy"] == [[(0.0, 105.0), (130.0, 30.0), (260.0, 45.0)], [(0.0, 120.0), (260.0, 90.0)]]
    compared = drawn["Rewards, each from its lowest (0) to its highest (1)"]
    assert compared == [drawn["Reward"][0], [(0.0, 0.0), (260.0, 120.0)]]
    assert "Learning rate" not in drawn
    assert draw_curves(LINES[:1]) is None and draw_curves([]) is None


def test_a_long_curve_has_few_points_and_a_spike_of_a_number_that_is_not_averaged() -> None:
    lines = [{"step": s, "reward/mean": float(s % 2), "policy/lr": 1e-6 * (1 + (s == 1234))} for s in range(2001)]
    picture = draw_curves(lines)
    assert picture is not None
    drawn = [line.split() for line in re.findall(r'points="([^"]*)"', picture)]
    assert len(drawn) == 2 and all(len(line) < 500 for line in drawn)
    assert max(float(point.split(",")[1]) for point in drawn[1]) == 120.0
    assert [point for point in drawn[1] if point.endswith(",0.0")] == ["160.4,0.0"]
