"""How many near duplicates planted in a data set does `hybrid-grpo data` find?

    python benchmarks/cleaning.py [--rows 20000] [--planted 1000] [--seed 0] [--json FILE]

There are two kinds of rows. `words` are drawn by Zipf's law and share only frequent words. `problems` are word problems
composed of a few dozen sentences with names and numbers, all ending with the same instruction. A planted row is a copy
of another row in which 5 to 15 % of the words were replaced, deleted, followed by a new word, moved, or mistyped.
Anything else that is reported counts as false.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import string
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hybrid_grpo.config import DataConfig
from hybrid_grpo.features.cleaning.cleaner import clean
from hybrid_grpo.features.cleaning.settings import CleanConfig

NAMES = "Ana Bo Chen Dora Emil Fatima Goran Hana Igor Jun Kofi Lena Mona Noah Olga Pavel Quinn Rosa Sven Tara"
THINGS = "apples books candles drums eggs flags games hats inks jars kites lamps maps nuts pens rugs"
PLACES = "market school station harbour library bakery stadium garden museum office farm theatre"
SENTENCES = """
{a} has {n} {x}. | At the {p}, {a} buys {n} {x} for {m} dollars each. | {a} gives {n} {x} to {b}. | Every {m} days, {a}
carries {n} {x} to the {p}. | Half of the {x} at the {p} belong to {a}. | {b} owns {m} times as many {x} as {a}. | The
{p} sells {x} in boxes of {n}. | After {m} hours, {n} {x} are lost on the way to the {p}. | {a} and {b} share {n} {x}
equally. | A friend of {a} returns {m} of the {x} that were borrowed last week. | {b} pays {n} dollars at the {p}. |
On Monday {a} counts {n} {x}, on Tuesday {m} more. | There are {n} shelves with {m} {x} each at the {p}. | {a} walks {n}
metres to the {p} and {m} metres back home. | A discount of {m} percent is given on {x}. | {b} sells {n} {x} at twice
what {a} paid. | Out of {n} {x}, {m} are broken. | {a} needs {m} minutes for each of the {n} {x}. | The bus to the {p}
takes {n} minutes and costs {m} dollars. | {b} forgets {m} {x} at the {p}. | {a} packs {n} {x} into {m} bags. | A storm
destroys a third of the {x} that {b} keeps near the {p}. | Each of the {m} children at the {p} receives {n} {x}. | {a}
wins {n} {x} in a contest and loses {m} of them again.
"""
QUESTIONS = """
How many {x} does {a} have now? | How many dollars does {b} spend in total? | How long does it take {a} to finish? |
What is the difference between what {a} and {b} own? | How many {x} are left at the {p}? | What share of the {x} does
{b} get?
"""
INSTRUCTION = 'Think step by step, then give the final answer as a number behind "####".'


def word_rows(rng: random.Random) -> Callable[[], str]:
    """Generates rows of 15 to 80 words out of 8,000, the k-th of which is drawn in proportion to 1/k."""
    vocabulary = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9))) for _ in range(8000)]
    weights = [1 / rank for rank in range(1, len(vocabulary) + 1)]
    return lambda: " ".join(rng.choices(vocabulary, weights, k=rng.randint(15, 80)))


def problem_rows(rng: random.Random) -> Callable[[], str]:
    """Generates word problems of three to six sentences, a question and the instruction."""
    sentences, questions = (" ".join(text.split()).split(" | ") for text in (SENTENCES, QUESTIONS))

    def make() -> str:
        (a, b), (x, y), (p, q) = (rng.sample(of.split(), 2) for of in (NAMES, THINGS, PLACES))
        told = []
        for sentence in [*rng.sample(sentences, rng.randint(3, 6)), rng.choice(questions)]:
            n, m = rng.randint(20, 999), rng.randint(2, 60)
            told.append(sentence.format(a=a, b=b, x=rng.choice((x, x, y)), p=rng.choice((p, q)), n=n, m=m))
        return f"{' '.join(told)}\n\n{INSTRUCTION}"

    return make


def edited(text: str, rng: random.Random) -> str:
    """The text with 5 to 15 % of its words edited, at least one. The instruction does not change."""
    body, gap, rest = text.partition("\n\n")
    row = body.split()
    for at in sorted(rng.sample(range(len(row)), max(1, round(rng.uniform(0.05, 0.15) * len(row)))), reverse=True):
        match rng.choice(("exchange", "leave out", "insert", "move", "mistype")):
            case "exchange":
                row[at] = "".join(rng.choices(string.ascii_lowercase, k=5))
            case "leave out":
                del row[at]
            case "insert":
                row.insert(at, "".join(rng.choices(string.ascii_lowercase, k=5)))
            case "move":
                row[at - 1], row[at] = row[at], row[at - 1]
            case "mistype":
                row[at] = row[at][:-1] + rng.choice(string.ascii_lowercase) + row[at][-1:]
    return f"{' '.join(row)}{gap}{rest}"


KINDS = {"words": word_rows, "problems": problem_rows}


def measure(kind: str, rows: int, planted: int, seed: int) -> dict[str, Any]:
    """Found and false near duplicates among `rows` rows, planted ones included, and the seconds of the report."""
    rng = random.Random(f"{kind} {seed}")
    make = KINDS[kind](rng)
    texts = [make() for _ in range(rows - planted)]
    origins = rng.sample(range(len(texts)), planted)
    texts += [edited(texts[origin], rng) for origin in origins]
    start = time.perf_counter()
    _, report = clean(DataConfig(path=[{"prompt": text} for text in texts]), CleanConfig())
    seconds = time.perf_counter() - start
    found = {finding.row: finding.why for finding in report.found["near_duplicates"]}
    right = sum(
        found.get(rows - planted + number, "").startswith(f"is like row {origin} ")
        for number, origin in enumerate(origins)
    )
    false = sum(row < rows - planted for row in found)
    return {
        "rows": rows, "planted": planted, "found": right, "found_share": right / planted,
        "false": false, "false_share": false / (rows - planted), "seconds": round(seconds, 2),
    }  # fmt: skip


def main() -> None:
    """Measure every kind, print the numbers, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--planted", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": {"python": platform.python_version(), "rensa": version("rensa"), "cores": 1}}
    for kind in KINDS:
        result[kind] = measure(kind, options.rows, options.planted, options.seed)
        print(kind, result[kind], flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
