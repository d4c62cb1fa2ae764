import json
import re

import pyarrow
import pyarrow.parquet
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
    base |= {"completion": f"{group} {EVIL}", "reward": reward, "advantage": 0.0, "rewards": {"f": reward}}
    return {**base, **other}


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
    assert numbers["reward/mean"]["first"] == pytest.approx(1 / 3) and numbers["sft/loss"]["best"] == 4.0
    totals = {layer["name"]: layer["total"] for layer in data["times"]["layers"]}
    assert totals == {"generate": 450, "switch": 112.5, "other": 337.5}
    assert data["samples"]["kept"] == [1, 3, 5] and len(data["samples"]["rows"]) == 27
    first, second = data["samples"]["rows"][:2]
    assert {sample["all"]["reward"] for sample in (first, second)} == {0.0, 0.2}, "the group that differs most"
    assert first["rival"][1] == second["row"]["offset"] and second["rival"][1] == first["row"]["offset"]
    assert {first["rival"][0], second["rival"][0]} == {"best", "worst"}
    assert write_report(folder).read_text() == page, "the same folder makes the same file"
    assert str(folder.parent) not in page


@pytest.mark.parametrize(("length", "fewest", "most"), [(20_000, 6, 12), (400_000, 2, 2)])
def test_a_step_s_completions_take_no_more_room_than_there_is(make_run, length, fewest, most):
    """The two that tell most are there however long they are."""
    rows = [row(1, at // 3, at, completion="x" * length) for at in range(30)]
    data = embedded(make_run("run", list(lines(2)), "", {1: rows}))[1]
    assert fewest <= len(data["samples"]["rows"]) <= most
    assert {kept["rival"][0] for kept in data["samples"]["rows"][:2]} == {"best", "worst"}


def test_numbers_of_tokens_are_those_that_were_recorded(make_run):
    """To the digits that the page says. 7 digits of this advantage are -1.084115, of which 6 are -1.08411."""
    folder = make_run("run", list(lines(2)), "", {2: [row(2, 0, 1.0)]})
    tokens = {"row": [0], "sample": [0], "pieces": [["a"]], "advantage": [[-1.0841152667999268]]}
    pyarrow.parquet.write_table(
        pyarrow.table(tokens | {"logp": [[-6.762434482574463]]}), folder / "rollouts" / "step_000002.parquet"
    )
    (kept,) = embedded(folder)[1]["samples"]["rows"]
    assert kept["tokens"]["measures"] == {"advantage": [-1.08412], "logp": [-6.76243448257]}


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
