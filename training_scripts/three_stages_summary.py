"""The results of three_stages.sh: summary.json next to the run folders, and three printed lines."""

import argparse
import json
from pathlib import Path
from typing import Any

from three_stages_pairs import NOISE

SCORES = {
    "step": "step",
    "proxy": "eval/proxy/reward_mean",
    "true_score": "eval/true_score/reward_mean",
    "accuracy": "eval/true_score/accuracy",
    "greedy_accuracy": "eval/greedy/accuracy",
}
"""Names in the summary, and the metrics: of sampled answers to held-out words the reward model's score, the true score
and the accuracy, and the accuracy of greedy answers."""


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def curve(run: Path) -> list[dict[str, float]]:
    """The evaluations of the last stage, in the order of steps."""
    lines = [line for line in metrics(run) if SCORES["true_score"] in line]
    return [{name: line[metric] for name, metric in SCORES.items()} for line in lines]


def summary(place: Path) -> dict[str, Any]:
    """The results of all stages in a folder."""
    heldout = len((place / "pairs/heldout.jsonl").read_text().splitlines())
    possible = 1 - round(NOISE * heldout) / heldout
    accuracy = metrics(place / "reward")[-1]["reward_model/heldout_accuracy"]
    seconds = dict(line.split() for line in (place / "seconds.txt").read_text().splitlines())
    points = curve(place / "train")
    return {
        "reward_model": {
            "heldout_pairs": heldout,
            "heldout_accuracy": accuracy,
            "possible_accuracy": possible,
            "share_of_possible": accuracy / possible,
        },
        "before": points[0],
        "after": points[-1],
        "best": max(points, key=lambda point: point["true_score"]),
        "curve": points,
        "seconds": {**{name: int(took) for name, took in seconds.items()}, "total": sum(map(int, seconds.values()))},
    }


def lines(place: Path, found: dict[str, Any]) -> list[str]:
    """The lines printed at the end."""
    model, before, after, best = (found[name] for name in ("reward_model", "before", "after", "best"))
    return [
        f"reward model: right about {model['heldout_accuracy']:.3f} of the held-out pairs;"
        f" their noise allows {model['possible_accuracy']:.3f}",
        f"held-out words: {before['accuracy']:.3f} -> {after['accuracy']:.3f} of sampled answers are right; true score"
        f" {before['true_score']:.3f} -> {after['true_score']:.3f}, highest {best['true_score']:.3f} at step"
        f" {best['step']}; the reward model's score {before['proxy']:.3f} -> {after['proxy']:.3f}",
        f"{found['seconds']['total']} s; numbers in {place / 'summary.json'}, curves in {place / 'train/report.html'}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place", type=Path, help="folder of the run folders sft, reward and train")
    place = parser.parse_args().place
    found = summary(place)
    (place / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(lines(place, found)))


if __name__ == "__main__":
    main()
