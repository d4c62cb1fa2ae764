"""What details.jsonl says of a step, and that it is what happened."""

import itertools
import json
import math
from collections import defaultdict
from statistics import fmean, stdev

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_grpo.config import LogConfig
from hybrid_grpo.data.batch import Completion, Prompt, Rollout, Scores
from hybrid_grpo.records.files import cut_lines
from hybrid_grpo.records.json_lines import read_jsonl
from hybrid_grpo.records.step_trace import BUCKETS, StepTrace, histogram, of_counts, trace_line


def make_rollout(ids: list[int], reward_B: list[float], guest: str = "") -> tuple[Rollout, Scores, torch.Tensor]:
    """Groups of two; the second of each is the guest's, if there is one."""
    prompts = [Prompt(id, "?", [1], {}) for id in ids]
    completions = [Completion([1] * (row + 1), [], "stop", writer=guest * (row % 2)) for row in range(2 * len(ids))]
    scores = Scores(torch.tensor(reward_B, dtype=torch.float64), {}, {})
    return Rollout(prompts, completions, 2), scores, scores.reward_B.float() - 0.5


def part_of(taken, spans=(("generate", 5.0, 6.5), ("step", 5.0, 8.0)), step=1, **log):
    details = StepTrace(LogConfig(**log), steps=9)
    details.begin(step)
    return details.own(spans, taken)


def test_the_parts_of_all_ranks_become_one_line():
    parts = [
        part_of(make_rollout([7, 3], [1.0, 0.0, math.nan, 0.5])),
        part_of(make_rollout([4, 9], [1.0, 1.0, 0.0, 0.25])),
    ]
    line = trace_line(1, parts)
    assert line["prompts"][0] == [7, 0.5, 0.7071] and [group[0] for group in line["prompts"]] == [7, 3, 4, 9]
    assert line["prompts"][1][1] == 0.5 and math.isnan(line["prompts"][1][2])
    assert line["stages"] == [[["generate", 0.0, 1.5]]] * 2 and "decoder" not in line
    assert sum(line["histograms"]["reward"]["counts"]) == 7, "a reward that failed is in no bucket"
    counts, edges = np.histogram([1, 2, 3, 4] * 2, BUCKETS)
    assert line["histograms"]["length"] == {"edges": edges.round(3).tolist(), "counts": counts.tolist()}


def test_a_group_without_rewards_has_neither_mean_nor_spread():
    (group,) = part_of(make_rollout([7], [math.nan, math.nan]))["prompts"]
    assert group[0] == 7 and all(map(math.isnan, group[1:]))


def test_rewards_of_guests_are_not_the_policys():
    taken = make_rollout([7, 3], [0.25, 1.0, 0.5, 1.0], guest="expert")
    assert [group[1] for group in part_of(taken)["prompts"]] == [0.25, 0.5]


@pytest.mark.parametrize(("step", "due"), [(1, True), (2, False), (3, True), (4, False), (9, True)])
def test_histograms_are_made_every_so_many_steps_the_first_and_the_last(step, due):
    line = trace_line(step, [part_of(make_rollout([7], [0.0, 1.0]), step=step, histograms_every=3)])
    assert ("histograms" in line) == due and "prompts" in line


def test_details_that_are_off_or_of_a_step_without_stages_are_none():
    taken = make_rollout([7], [0.0, 1.0])
    assert part_of(taken, details=False) is None and part_of(None, spans=()) is None
    assert "histograms" not in trace_line(1, [part_of(taken, histograms_every=0)])


@given(st.lists(st.floats(0, 3.999), min_size=1), st.integers(0, 5))
def test_counts_of_many_buckets_keep_their_sum_and_their_place(values, ranks):
    count_K = torch.histc(torch.tensor(values), 1024, 0.0, 4.0).numpy()
    found = of_counts(count_K * (ranks + 1), 4.0)
    edges, counts = found["edges"], found["counts"]
    assert sum(counts) == len(values) * (ranks + 1) and 1 <= len(counts) == len(edges) - 1 <= BUCKETS
    assert edges[0] <= min(values) + 1e-3 and max(values) <= edges[-1] + 1e-3 and counts[0] and counts[-1]
    inside = sum(edges[1] + 1e-3 <= value for value in values)
    assert sum(counts[1:]) >= inside * (ranks + 1)


def test_a_histogram_of_equal_values_has_one_bucket_and_one_of_none_is_none():
    assert histogram(np.array([2.0, 2.0, math.nan])) == {"edges": [1.5, 2.5], "counts": [2]}
    assert histogram(np.array([math.nan])) is None and of_counts(np.zeros(8), 1.0) is None


@pytest.mark.parametrize(
    ("text", "step", "kept"),
    [
        ('{"step":1,"a":2}\n{"step": 2}\n{"step":10}\n', 2, 2),
        ('{"step":1}\n{"step":2,"prom', 2, 1),
        ('{"step":1}\n\x00\x00\x00\n{"step":2}\n', 5, 1),
        ('{"step":1}\n', -1, 0),
        ("", 3, 0),
    ],
)
def test_lines_behind_a_step_are_cut(tmp_path, text, step, kept):
    path = tmp_path / "details.jsonl"
    path.write_text(text)
    cut_lines(path, step)
    assert path.read_text().splitlines() == text.splitlines()[:kept]
    cut_lines(tmp_path / "missing", step)


@pytest.mark.ranks
def test_the_details_of_a_run_are_what_happened(whole_run):
    """Against what the run has written of the same steps elsewhere: its rollouts and its metrics."""
    lines = read_jsonl(whole_run.folder / "details.jsonl")
    numbers = {line["step"]: line for line in read_jsonl(whole_run.folder / "metrics.jsonl")}
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        metrics, step = numbers[line["step"]], line["step"]
        rows, rewards = read_jsonl(whole_run.folder / f"rollouts/step_{step:06d}.jsonl"), defaultdict(list)
        for row in rows:
            rewards[row["group"], row["prompt_id"]].append(row["reward"])
        assert [prompt for _, prompt in rewards] == [prompt for prompt, *_ in line["prompts"]]
        for (_, mean, spread), of_group in zip(line["prompts"], rewards.values(), strict=True):
            assert (mean, spread) == pytest.approx((fmean(of_group), stdev(of_group)), rel=1e-3)
        if histograms := line.get("histograms"):
            assert sum(histograms["length"]["counts"]) == len(rows)
            assert sum(histograms["entropy"]["counts"]) == sum(row["length"] for row in rows)
            counts, edges = histograms["entropy"]["counts"], histograms["entropy"]["edges"]
            mean = np.average([fmean(bucket) for bucket in itertools.pairwise(edges)], weights=counts)
            assert mean == pytest.approx(metrics["policy/entropy"], abs=edges[1] - edges[0])
        assert ("histograms" in line) == (step in (1, 6))
        stages = [{name: end - begin for name, begin, end in of_rank} for of_rank in line["stages"]]
        slack = 0.002
        for metric, names in (
            ("time/generate_s", ("generate", "wait")),
            ("time/straggler_s", ("wait",)),
            ("time/switch_s", ("gather", "release")),
            ("time/train_s", ("train",)),
        ):
            assert fmean(sum(of[name] for name in names) for of in stages) == pytest.approx(metrics[metric], abs=slack)
        for of_rank, course in zip(line["stages"], line["decoder"], strict=True):
            begins = [begin for _, begin, _ in of_rank]
            assert begins == sorted(begins) and begins[0] >= 0
            assert (course["decoding"][-1], course["waiting"][-1], course["queued"][-1]) == (0, 0, 0)
            most = max(now + queued for now, queued in zip(course["decoding"], course["queued"], strict=True))
            assert most == len(rows) / 2 and max(course["decoding"]) <= course["slots"]
            assert 0 < course["pages_used_max"] <= 1
            generate = next((begin, end) for name, begin, end in of_rank if name == "generate")
            assert generate[0] - slack <= course["t"][0] <= course["t"][-1] <= generate[1] + slack
        assert len(json.dumps(line)) < 10_000
