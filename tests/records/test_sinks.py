import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybrid_grpo.config import LogConfig
from hybrid_grpo.data.batch import Completion, Prompt, Rollout, Scores
from hybrid_grpo.distributed import ranks as distributed
from hybrid_grpo.records.files import as_json, json_safe
from hybrid_grpo.records.sinks import JsonlSink, Log, rollout_lines

QUIET = LogConfig(wandb="disabled")


def objects(path):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    with path.open(encoding="utf-8") as file:
        return [json.loads(line, parse_constant=refuse) for line in file]


def make_rollout(columns=None):
    prompts = [Prompt(7, "sort: ba", [1], columns or {}), Prompt(9, [{"role": "user", "content": "?"}], [1], {})]
    completions = [Completion([2, 3][:n], [-0.1] * n, "stop", text) for n, text in ((1, "ab"), (2, "b\u2028a"))] * 2
    rollout = Rollout(prompts, completions, num_generations=2)
    reward_B = torch.tensor([1.0, 0.0, 0.5, 0.5], dtype=torch.float64)
    exact_B = torch.tensor([1.0, math.nan, 0.5, 0.5], dtype=torch.float64)
    scores = Scores(
        reward_B, {"exact": exact_B}, {"exact": torch.tensor([0, 1, 0, 3])}, extra={"exact/n": [1, "x", None, 4]},
        failures={"exact": [None, None, None, "took too long"]},
    )  # fmt: skip
    return rollout, scores, torch.tensor([1.0, -1.0, 0.0, 0.0])


def test_jsonl_has_one_readable_line_a_step_at_every_moment(tmp_path):
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.write(1, {"reward/mean": 0.1, "policy/grad_norm": math.inf, "policy/loss": math.nan})
    assert objects(tmp_path / "m.jsonl") == [
        {"step": 1, "reward/mean": 0.1, "policy/grad_norm": None, "policy/loss": None}
    ]
    assert next(iter(objects(tmp_path / "m.jsonl")[0])) == "step"
    with pytest.raises(AssertionError, match="step 1 is written after step 1"):
        sink.write(1, {})


def test_a_resumed_run_has_no_step_twice_and_no_torn_line(tmp_path):
    path = tmp_path / "m.jsonl"
    sink = JsonlSink(path)
    for step in range(6):
        sink.write(step, {"reward/mean": step})
    sink.close()
    with path.open("a") as file:
        file.write('{"step": 6, "rew')
    sink = JsonlSink(path, done=3)
    sink.write(4, {"reward/mean": 40})
    assert [(line["step"], line["reward/mean"]) for line in objects(path)] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40)]
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


def test_a_new_run_in_an_old_folder_starts_empty(tmp_path):
    JsonlSink(tmp_path / "m.jsonl").write(0, {})
    JsonlSink(tmp_path / "m.jsonl").close()
    assert objects(tmp_path / "m.jsonl") == []


def test_rollout_lines_tell_every_completion(monkeypatch):
    monkeypatch.setattr(distributed, "rank", lambda: 3)
    rows = [json.loads(line) for line in rollout_lines(12, *make_rollout({"answer": "ab", "odd": {1: object}}))]
    assert [row["group"] for row in rows] == [6, 6, 7, 7], "groups are numbered over all ranks"
    assert [row["sample"] for row in rows] == [0, 1, 0, 1]
    assert [row["rewards"]["exact"] for row in rows] == [1.0, None, 0.5, 0.5]
    assert [row["failed"] for row in rows] == [{}, {}, {}, {"exact": "took too long"}]
    assert rows[1] == {
        "step": 12, "group": 6, "sample": 1, "prompt_id": 7, "prompt": "sort: ba", "completion": "b\u2028a",
        "reward": 0.0, "rewards": {"exact": None}, "failed": {},
        "extra": {"exact/n": "x"}, "advantage": -1.0, "length": 2, "finish": "stop",
        "columns": {"answer": "ab", "odd": {"1": "<class 'object'>"}},
    }  # fmt: skip
    assert rows[2]["prompt"] == [{"role": "user", "content": "?"}]


def test_rollout_lines_have_the_steps_where_some_are_scored():
    rollout, scores, advantages_B = make_rollout()
    scores = replace(scores, steps=[[(1, 1.0)], [], [(1, 0.25), (2, 0.25)], []], whole_B=torch.zeros(4))
    rows = [json.loads(line) for line in rollout_lines(12, rollout, scores, advantages_B)]
    assert [row["steps"] for row in rows] == [[[1, 1.0]], [], [[1, 0.25], [2, 0.25]], []]


def test_json_safe_keeps_what_json_has():
    value = {"a": [1, "x", None, True, 0.5]}
    assert json_safe(value) == value
    assert json_safe({2: (math.nan, -math.inf)}) == {"2": [None, None]}
    assert json.loads(as_json(value)) == value
    assert as_json({2: (math.nan, Path("p"))}) == '{"2": [null, "p"]}'


def test_rollouts_survive_text_that_utf8_cannot_hold(tmp_path):
    with Log(QUIET, tmp_path, steps=1) as log:
        log.write_rollouts(1, *make_rollout({"odd": "\ud800"}))
    assert objects(tmp_path / "rollouts" / "step_000001.jsonl")[0]["columns"]["odd"] == "?"


def test_rollouts_are_written_of_the_first_the_last_and_every_nth_step(tmp_path):
    with Log(LogConfig(wandb="disabled", rollouts_every=3), tmp_path, steps=8) as log:
        for step in range(1, 9):
            log.write_rollouts(step, *make_rollout())
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == [
        f"step_{step:06d}.jsonl" for step in (1, 3, 6, 8)
    ]
    Log(QUIET, tmp_path, steps=8, done=5).close()
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["step_000001.jsonl", "step_000003.jsonl"]


def test_rollouts_can_be_turned_off(tmp_path):
    with Log(LogConfig(wandb="disabled", rollouts_every=0), tmp_path, steps=1) as log:
        log.write_rollouts(1, *make_rollout())
    assert not (tmp_path / "rollouts").exists()


def test_rollouts_of_all_ranks_are_in_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "gather_objects", lambda part: [part, (['{"from": "rank 1"}'], {})])
    with Log(QUIET, tmp_path, steps=1) as log:
        log.write_rollouts(1, *make_rollout())
    rows = objects(tmp_path / "rollouts" / "step_000001.jsonl")
    assert len(rows) == 5 and rows[4] == {"from": "rank 1"}


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    monkeypatch.setattr(distributed, "gather_objects", lambda lines: None)
    with Log(LogConfig(wandb="offline"), tmp_path / "run", steps=1) as log:
        log.write(1, {"reward/mean": 1.0})
        log.write_rollouts(1, *make_rollout())
    assert not (tmp_path / "run").exists()
