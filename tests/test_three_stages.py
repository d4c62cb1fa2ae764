"""The data and the summary of training_scripts/three_stages.sh; the script itself is in test_recipes.py."""

import json
import random
import sys

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / "training_scripts"))

import three_stages_summary
from quickstart_task import make_rows
from three_stages_pairs import CLEAR, HELD_OUT_PROMPTS, make_pairs, true_score


def make_samples(rows):
    """As `generate` writes them: right answers, and such with two letters exchanged or a letter left out."""
    draw = random.Random(0)
    samples = []
    for number, row in enumerate(rows):
        answer = row["completion"]
        for sample, text in enumerate([answer, answer[1] + answer[0] + answer[2:], answer[:-1], answer]):
            line = {"id": number, "sample": sample, "prompt": row["prompt"], "completion": text}
            samples.append({**line, "columns": {"completion": answer}})
    draw.shuffle(samples)
    return samples


@pytest.mark.parametrize(
    ("completion", "score"), [("abcd", 2.0), ("abdc", 0.5), ("abc", 0.75), ("", 0.0), ("abcde", 0.8)]
)
def test_the_true_score_is_that_of_the_quickstart(completion, score):
    assert true_score(completion, "abcd") == pytest.approx(score)


def test_pairs_are_clear_and_as_many_as_stated_are_labeled_the_wrong_way_round():
    task = make_rows(seed=3)
    rows = task["sft"][:1500]
    samples = make_samples(rows)
    pairs = make_pairs(samples, seed=3)
    answers = {row["prompt"]: row["completion"] for row in rows}
    for split in pairs.values():
        gains = [
            true_score(pair["chosen"], answers[pair["prompt"]]) - true_score(pair["rejected"], answers[pair["prompt"]])
            for pair in split
        ]
        assert all(abs(gain) >= CLEAR for gain in gains)
        assert sum(gain < 0 for gain in gains) == round(0.1 * len(split))
        assert len({tuple(pair.values()) for pair in split}) == len(split) > 0
    prompts = {split: {pair["prompt"] for pair in rows} for split, rows in pairs.items()}
    assert len(prompts["heldout"]) == HELD_OUT_PROMPTS and not prompts["heldout"] & prompts["train"]
    watched = {row["prompt"] for split in ("train", "heldout") for row in task[split]}
    assert not watched & (prompts["heldout"] | prompts["train"]), "words of the last stage are in no pair"
    assert make_pairs(samples[::-1], seed=3) == pairs, "generate writes in the order of finishing"
    assert make_pairs(samples, seed=4) != pairs


def test_the_summary_says_what_each_stage_has_reached(tmp_path):
    def write(name, lines):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    names = [f"eval/{name}" for name in ("proxy/reward_mean", "true_score/reward_mean", "true_score/accuracy")]
    names += ["eval/greedy/accuracy"]
    scores = {0: (-1.0, 1.0, 0.5, 0.5), 10: (0.5, 1.75, 0.75, 0.875), 20: (1.5, 1.5, 0.625, 0.75)}
    write("pairs/heldout.jsonl", [{}] * 41)
    write("reward/metrics.jsonl", [{"step": 0}, {"step": 2, "reward_model/heldout_accuracy": 0.6}])
    write(
        "train/metrics.jsonl",
        [{"step": step, **dict(zip(names, scores.get(step, ()), strict=False))} for step in range(21)],
    )
    (tmp_path / "seconds.txt").write_text("task 5\nsft 20\npairs 30\nreward 40\ntrain 7\ntrain 60\n")
    found = three_stages_summary.summary(tmp_path)
    assert found["reward_model"] == {
        "heldout_pairs": 41,
        "heldout_accuracy": 0.6,
        "possible_accuracy": pytest.approx(37 / 41),
        "share_of_possible": pytest.approx(0.6 / (37 / 41)),
    }
    assert [list(point.values()) for point in found["curve"]] == [[step, *point] for step, point in scores.items()]
    assert [found[name]["step"] for name in ("before", "after", "best")] == [0, 20, 10]
    assert found["seconds"] == {"task": 5, "sft": 20, "pairs": 30, "reward": 40, "train": 60, "total": 155}
    said = "\n".join(three_stages_summary.lines(tmp_path, found))
    assert "1.000 -> 1.500, highest 1.750 at step 10" in said and "allows 0.902" in said
