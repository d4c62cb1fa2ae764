import json
import re

import pytest

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.watch.frozen import write_report

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def embedded(folder):
    page = write_report(folder).read_text()
    return page, json.loads(
        re.search(r'<script type="application/json" id="frozen">(.*?)</script>', page, re.DOTALL)[1]
    )


def lines(steps):
    for step in range(1, steps + 1):
        yield {
            "step": step, "reward/mean": step / 3, "sft/loss": 5.0 - step / steps, "time/step_s": 1.0,
            "time/generate_s": 0.5, "time/switch_s": 0.125, f"reward/{EVIL}/mean": 0.5,
        }  # fmt: skip


def row(step, group, reward, **other):
    base = {"step": step, "group": group, "sample": 0, "prompt_id": group, "prompt": "p", "finish": "stop", "length": 3}
    return {
        **base,
        "completion": f"{group} {EVIL}",
        "reward": reward,
        "advantage": 0.0,
        "rewards": {"f": reward},
        **other,
    }


def test_the_page_is_in_one_file_that_asks_nobody(make_run):
    """Whatever completions say, and whatever a metric is called."""
    rows = [row(0, group, reward) for group in range(3) for reward in (0.0, group / 10, None)]
    folder = make_run("run", list(lines(900)), "policy: {lr: 0.1}", {step: rows for step in (1, 2, 3, 4, 5)})
    page, data = embedded(folder)
    assert not re.search(r"https?://", re.sub(r"https?://(www\.w3\.org|github\.com/leeoniya/uPlot)", "", page))
    assert not re.search(r'(src|href)="(?!data:|#)', page) and "default-src 'none'" in page
    assert page.count("</script>") == page.count("<script") == 5, "the page's own: nothing in it ends or begins one"
    assert "<img" not in page and len(page) < 500_000
    for curve in data["curves"]["curves"].values():
        for place, values in curve.values():
            assert 150 <= len(values) == len(data["curves"]["places"][place]) <= 310
    raw = data["curves"]["curves"]["reward/mean"]["raw"]
    assert (data["curves"]["places"][raw[0]][-1], raw[1][-1]) == (900, 300)
    assert data["curves"]["axes"]["hours"][-1] == 0.25
    assert data["settings"]["texts"] == {"run": "policy: {lr: 0.1}"}
    numbers = {entry["name"]: entry for entry in data["runs"]["open"][0]["numbers"]}
    assert numbers["reward/mean"]["first"] == pytest.approx(5.5 / 3) and numbers["sft/loss"]["best"] == 4.0
    layers = {layer["name"]: layer for layer in data["times"]["layers"]}
    assert {name: layer["total"] for name, layer in layers.items()} == {
        "generate": 450,
        "switch": 112.5,
        "other": 337.5,
    }
    assert data["times"]["steps"][-1][1] == 900 and len(data["times"]["steps"]) == 240
    assert data["samples"]["kept"] == [1, 3, 5] and len(data["samples"]["rows"]) == 27
    first, second = data["samples"]["rows"][:2]
    assert {sample["all"]["reward"] for sample in (first, second)} == {0.0, 0.2}, "the group that differs most"
    assert first["rival"][1] == second["row"]["offset"] and second["rival"][1] == first["row"]["offset"]
    assert {first["rival"][0], second["rival"][0]} == {"best", "worst"}
    assert write_report(folder).read_text() == page, "the same folder makes the same file"
    assert str(folder.parent) not in page


def test_a_step_s_completions_take_no_more_room_than_there_is(make_run):
    folder = make_run("run", list(lines(2)), "", {1: [row(1, at, at, completion="x" * 20_000) for at in range(99)]})
    page, data = embedded(folder)
    assert 5 < len(data["samples"]["rows"]) < 13 and len(page) < 600_000


@pytest.mark.parametrize("line", ['{"step": 1, "reward/mean": 0.5}', '{"step": 0, "eval/heldout/accuracy": null}'])
def test_what_a_run_does_not_have_is_left_out(make_run, line):
    """Also a line that is still being written."""
    folder = make_run("run", [])
    (folder / "metrics.jsonl").write_text(line + '\n{"step": 7, "rew')
    data = embedded(folder)[1]
    assert data["times"] is None and data["samples"]["rows"] == data["step"]["kept"] == []
    assert data["curves"]["axes"]["step"] == [json.loads(line)["step"]]


def test_a_folder_without_metrics_is_refused(tmp_path):
    with pytest.raises(UserError, match="metrics"):
        write_report(tmp_path)
