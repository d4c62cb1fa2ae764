import json
import re

import pytest

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.run.catalogue import CATALOGUE, duration
from hybrid_grpo.run.charts import CHARTS
from hybrid_grpo.run.report import (
    PARTS,
    charts,
    differing,
    key_numbers,
    samples,
    step_parts,
    thin,
    time_shares,
    write_report,
)

CONFIG = "# torch: 2.13.0\n# commit: abc1234\npolicy:\n  model: my/model\n  lr: 0.0003\ngrpo:\n  beta: 0.0\n"


def write_metrics(folder, lines):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def row(group, reward, completion, **other):
    base = {"group": group, "sample": 0, "prompt_id": group, "prompt": "p", "finish": "stop", "length": 3}
    return {**base, "completion": completion, "reward": reward, "advantage": 0.0, "rewards": {"f": reward}, **other}


def write_rollout(folder, step, rows):
    (folder / "rollouts").mkdir(exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rollouts" / f"step_{step:06d}.jsonl").write_text(text)


def embedded(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def grpo_lines(steps):
    yield {"step": 0, "eval/heldout/accuracy": 0.25, "time/eval_s": 2.0}
    for step in range(1, steps + 1):
        yield {
            "step": step, "reward/mean": step / steps, "reward/std": 0.1, "reward/f/mean": 0.5, "policy/lr": 1e-4,
            "time/step_s": 1.0, "time/generate_s": 0.5, "time/train_s": 0.25, "progress/completions": 8 * step,
            "throughput/generated_tokens_per_s": 100.0, **({"eval/heldout/accuracy": 0.75} if step == steps else {}),
        }  # fmt: skip


def test_charts_show_metrics_of_the_catalogue():
    charts = [chart for members in CHARTS.values() for chart in members]
    shown = {name for chart in charts for name in (*chart["metrics"], chart.get("band")) if name}
    assert shown | {f"time/{part}_s" for part in PARTS} <= {metric.name for metric in CATALOGUE}
    assert "time/reference_s" in shown, "what streaming the reference costs has a chart of its own"


def test_a_full_run(tmp_path):
    write_metrics(tmp_path, grpo_lines(4))
    (tmp_path / "config.yaml").write_text(CONFIG)
    write_rollout(tmp_path, 1, [row(0, 1.0, "good"), row(0, 0.0, "bad")])
    page = write_report(tmp_path).read_text()
    data = embedded(page)
    titles = {chart["title"]: chart for chart in data["charts"]}
    assert list(titles) == ["Held-out accuracy", "Reward", "Reward functions", "Learning rate", "Generation"]
    assert titles["Held-out accuracy"]["curves"][0]["values"] == [0.25, None, None, None, 0.75]
    assert titles["Reward"]["band"] == [None, 0.1, 0.1, 0.1, 0.1]
    assert titles["Reward functions"]["curves"][0]["label"] == "f"
    assert "completions that are right, greedy ones" in titles["Held-out accuracy"]["curves"][0]["meaning"]
    assert data["steps"] == [0, 1, 2, 3, 4]
    assert all(text in page for text in (tmp_path.name, "2.13.0", "abc1234", "my/model", "0.250 →", "0.750"))
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "https://" not in page


def test_rewards_of_other_scales_are_compared_on_one_pair_of_axes():
    """A policy that exploits a reward model: the reward rises, what is held out falls."""
    lines = [
        {"step": 0, "eval/proxy/reward_mean": -1.0, "eval/true/reward_mean": 0.75, "eval/flat/reward_mean": 2.0},
        {"step": 1, "reward/mean": 3.0},
        {"step": 2, "reward/mean": 5.0, "eval/proxy/reward_mean": 3.0, "eval/true/reward_mean": 1.0},
        {"step": 4, "reward/mean": 4.0, "eval/proxy/reward_mean": 2.0, "eval/true/reward_mean": 0.0},
    ]
    title = next(chart["title"] for chart in CHARTS["Results"] if chart.get("compared"))
    (chart,) = [chart for chart in charts(lines) if chart["title"] == title]
    assert {curve["label"]: curve["drawn"] for curve in chart["curves"]} == {
        "reward": [None, 0.0, 1.0, 0.5],
        "proxy": [0.0, None, 1.0, 0.75],
        "true": [0.75, None, 1.0, 0.0],
        "flat": [0.0, None, None, None],
    }
    assert chart["curves"][2]["values"] == [0.75, None, 1.0, 0.0], "what the page says in numbers"
    alone = charts([{"step": line["step"], "reward/mean": line.get("reward/mean")} for line in lines])
    assert title not in {chart["title"] for chart in alone}, "nothing to compare"


def test_completions_cannot_break_out_of_the_page(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    write_metrics(tmp_path, [{"step": 1, "reward/mean": 0.5, "reward/</script><b>/mean": 0.5}])
    write_rollout(tmp_path, 1, [row(0, 1.0, evil, prompt=evil), row(0, 0.0, "x", rewards={evil: 1.0, "f": None})])
    page = write_report(tmp_path).read_text()
    assert page.count("</script>") == page.count("<script") == 2, "the page's own two scripts"
    assert "<img" not in page and "alert(1)" in page
    assert embedded(page)["steps"] == [1]


@pytest.mark.parametrize(
    "lines",
    [
        [{"step": 1, "reward/mean": 0.5}],
        [{"step": 0, "eval/heldout/accuracy": None}],
        [{"step": 1, "sft/loss": 2.0, "policy/lr": 1e-3}, {"step": 2, "sft/loss": 1.0, "time/step_s": 0.0}],
        [{"step": 1, "a/metric/of/another/version": 1.0}, {"step": 2, "a/metric/of/another/version": 2.0}],
    ],
    ids=["one step", "only a missing value", "sft", "unknown metric"],
)
def test_what_a_run_does_not_have_is_left_out(tmp_path, lines):
    write_metrics(tmp_path, lines)
    page = write_report(tmp_path).read_text()
    assert embedded(page)["steps"] == [line["step"] for line in lines]
    assert "Where the time" not in page and "<h2>Samples" not in page and "<details" not in page


def test_a_folder_without_metrics_is_refused(tmp_path):
    with pytest.raises(UserError, match="metrics"):
        write_report(tmp_path)


def test_a_line_still_being_written_is_left_out(tmp_path):
    write_metrics(tmp_path, [{"step": 1, "reward/mean": 0.5}])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    assert embedded(write_report(tmp_path).read_text())["steps"] == [1]


def test_thinning_keeps_the_ends_the_average_and_the_extremes():
    lines = [{"step": s, "reward/mean": float(s % 2), "completion/length_max": float(s)} for s in range(2001)]
    lines[17]["eval/heldout/accuracy"] = 0.5
    thinned = thin(lines, 1000)
    assert len(thinned) <= 1000
    assert thinned[0] == lines[0] and thinned[-1]["step"] == 2000
    assert [line["completion/length_max"] for line in thinned] == [line["step"] for line in thinned]
    assert sum(line["reward/mean"] for line in thinned) / len(thinned) == pytest.approx(0.5, abs=0.01)
    assert [line["eval/heldout/accuracy"] for line in thinned if "eval/heldout/accuracy" in line] == [0.5]
    assert thin(lines[:1000], 1000) == lines[:1000]


def test_the_parts_of_a_step_add_up_to_it():
    line = {"step": 1, "time/step_s": 1.0, "time/generate_s": 0.5, "time/switch_s": 0.125, "time/gather_s": 0.1}
    assert sum(step_parts(line).values()) == 1.0
    assert step_parts(line)["other"] == 0.375
    assert step_parts({"step": 0, "time/eval_s": 3.0}) == {}
    shares = {share["label"]: share["share"] for share in time_shares([line, {"step": 0}])}
    assert shares == {"generate": 0.5, "switch": 0.125, "other": 0.375}


def test_key_numbers_of_every_stage():
    numbers = {number["label"]: number for number in key_numbers(list(grpo_lines(4)))}
    accuracy = numbers["heldout accuracy"]
    assert (accuracy["before"], accuracy["value"]) == ("0.250", "0.750")
    assert accuracy["note"] == "best 0.750 at step 4"
    assert [numbers[name]["value"] for name in ("steps", "completions", "wall time")] == ["4", "32", "6.0 s"]
    loss = key_numbers([{"step": 1, "sft/loss": 3.0}, {"step": 2, "sft/loss": 1.0}, {"step": 3, "sft/loss": 2.0}])[0]
    assert (loss["before"], loss["value"], loss["note"]) == ("3.000", "2.000", "best 1.000 at step 2")
    name = "reward_model/heldout_accuracy"
    pairs = key_numbers([{"step": 0, name: 0.5}, {"step": 1, "reward_model/loss": 0.6}, {"step": 2, name: 0.75}])[0]
    assert (pairs["label"], pairs["note"]) == ("reward_model heldout_accuracy", "best 0.750 at step 2")


def test_samples_are_of_the_first_middle_and_last_step_and_of_the_groups_that_differ_most(tmp_path):
    rows = [row(group, reward, f"{group}") for group in range(5) for reward in (0.0, group / 10)]
    for step in range(1, 6):
        write_rollout(tmp_path, step, rows)
    shown = samples(tmp_path / "rollouts")
    assert [sample["step"] for sample in shown] == [1, 3, 5]
    assert [group["prompt_id"] for group in shown[0]["groups"]] == [4, 3, 2]
    assert [completion["reward"] for completion in shown[0]["groups"][0]["completions"]] == [0.4, 0.0]


def test_a_group_of_equal_rewards_is_shown_once(tmp_path):
    write_rollout(tmp_path, 1, [row(0, 1.0, "a" * 5000), row(0, 1.0, "b")])
    group = samples(tmp_path / "rollouts")[0]["groups"][0]
    assert group["equal"] and len(group["completions"]) == 1
    assert group["completions"][0]["hidden"] == 1000


def test_differences_are_marked_where_texts_are_alike_and_pieces_make_up_the_text():
    left, right = differing("the answer is 42 apples, I am quite sure of it", "the answer is 41 apples, I am quite so")
    assert ("42", True) in left and ("41", True) in right
    assert "".join(text for text, _ in left) == "the answer is 42 apples, I am quite sure of it"
    assert differing("aelmp", "aempl")[0] != [("aelmp", False)]
    assert differing("abc", "xyz") == ([("abc", False)], [("xyz", False)])
    assert differing("", "x") == ([], [("x", False)])


def test_durations():
    assert [duration(seconds) for seconds in (4.24, 200, 7500)] == ["4.2 s", "3 min 20 s", "2 h 05 min"]


def test_a_completion_without_a_reward_is_neither_best_nor_worst(tmp_path):
    write_metrics(tmp_path, [{"step": 1, "reward/mean": -1.5}])
    write_rollout(tmp_path, 1, [row(0, -1.0, "a"), row(0, None, "b"), row(0, -2.0, "c"), row(1, None, "d")])
    groups = samples(tmp_path / "rollouts")[0]["groups"]
    assert [[shown["completion"] for shown in group["completions"]] for group in groups] == [["a", "c"], ["d"]]
    assert "reward <strong>none</strong>" in write_report(tmp_path).read_text()
