"""Make noisy preferences from completions: pairs of a better and a worse answer to the same prompt.

Reads what `hybrid-grpo generate` wrote for rows with the columns `prompt` and `completion`, the right answer. The
quickstart's rewards, the true score, decide which of two completions is better; then a tenth of the pairs is labelled
the wrong way round, since people disagree. No prompt is in both files, `train.jsonl` and `heldout.jsonl`.
"""

import argparse
import itertools
import json
import random
from pathlib import Path
from typing import Any

from hybrid_grpo.rewards.rules import exact_match, letters_in_place

NOISE = 0.1
"""Share of the pairs in each file whose labels are swapped."""
CLEAR = 1.0
"""Least difference of the true scores of a pair. Only a right and a wrong answer differ by that much."""
HELD_OUT_PROMPTS = 500


def true_score(completion: str, answer: str) -> float:
    """The sum of the quickstart's rewards: 0 to 2."""
    scores = exact_match([completion], [answer]) + letters_in_place([completion], [answer])
    return sum(score for score in scores if isinstance(score, float))


def make_pairs(samples: list[dict[str, Any]], seed: int) -> dict[str, list[dict[str, str]]]:
    """Rows of both files; `samples` are the lines of `generate` in any order."""
    groups: dict[str, dict[str, float]] = {}
    for sample in sorted(samples, key=lambda line: (line["id"], line["sample"])):
        score = true_score(sample["completion"], sample["columns"]["completion"])
        groups.setdefault(sample["prompt"], {})[sample["completion"]] = score
    draw = random.Random(seed)
    prompts = list(groups)
    draw.shuffle(prompts)
    splits = {"heldout": prompts[:HELD_OUT_PROMPTS], "train": prompts[HELD_OUT_PROMPTS:]}
    rows: dict[str, list[dict[str, str]]] = {}
    for split, members in splits.items():
        rows[split] = []
        for prompt in members:
            found = [
                {"prompt": prompt, "chosen": one, "rejected": other}
                for one, other in itertools.permutations(groups[prompt], 2)
                if groups[prompt][one] - groups[prompt][other] >= CLEAR
            ]
            rows[split] += draw.sample(found, len(found))
        for row in draw.sample(rows[split], round(NOISE * len(rows[split]))):
            row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("samples", type=Path, help="what generate wrote")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    samples = [json.loads(line) for line in arguments.samples.read_text().splitlines()]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for split, rows in make_pairs(samples, arguments.seed).items():
        (arguments.folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(
            f"pairs: {len(rows):,} in {split}.jsonl, {round(NOISE * len(rows)):,} of them labelled the wrong way round"
        )


if __name__ == "__main__":
    main()
