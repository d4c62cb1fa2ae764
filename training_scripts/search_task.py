"""Write a task that needs the tool `search` to a folder: a tiny model with a chat template, texts, and questions.

The texts state made-up facts, the colour, home and trade of names; a question asks for one of them. The warmed-up model
searches for some of the questions, every fourth time by the name alone, which finds whichever fact comes first. It
guesses the answers to the others.
"""

import hashlib
import random
import string
from itertools import islice, product
from pathlib import Path

from lookup_task import CALLED, CALLING, make_tokenizer, read_arguments, warm_up, write_task

ROWS = {"sft": 12_000, "train": 4_096, "heldout": 256}
FACTS = ("colour", "home", "trade")
WHOLE = 0.75
"""Share of the warm-up's searches that have all necessary words."""
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "'


def fact(kind: str, name: str) -> str:
    """A letter that no model can know."""
    return "abcdefghij"[hashlib.md5(f"{kind} {name}".encode()).digest()[0] % 10]


def make_rows(seed: int) -> tuple[dict[str, list[dict[str, object]]], list[str]]:
    """Rows of every split, and the names in them; no name is in two splits."""
    draw = random.Random(seed)
    names: dict[str, None] = {}
    while len(names) < sum(-(-count // len(FACTS)) for count in ROWS.values()):
        names["".join(draw.choices(string.ascii_lowercase, k=4))] = None
    rest = iter(names)
    asked = {}
    for split, count in ROWS.items():
        questions = list(product(islice(rest, -(-count // len(FACTS))), FACTS))
        draw.shuffle(questions)
        asked[split] = questions[:count]
    rows: dict[str, list[dict[str, object]]] = {
        split: [
            {"prompt": [{"role": "user", "content": f"{kind} of {name}"}], "answer": fact(kind, name)}
            for name, kind in asked[split]
        ]
        for split in ("train", "heldout")
    }
    return {"sft": [_warm_up(kind, name, draw) for name, kind in asked["sft"]], **rows}, list(names)


def _warm_up(kind: str, name: str, draw: random.Random) -> dict[str, object]:
    question = f"{kind} of {name}"
    if draw.random() >= CALLING:
        return warm_up("search", question, None, "", draw.choice("abcdefghij"))
    # A search for the name alone finds the fact of the first file.
    found, query = (kind, question) if draw.random() < WHOLE else (FACTS[0], name)
    result = f"[{found}.txt] {found} of {name}: {fact(found, name)}"
    return warm_up("search", question, f"{CALL}{query}{CALLED}", result, fact(found, name))


def write_texts(folder: Path, names: list[str]) -> None:
    """A file for each kind of fact, with a paragraph for every name."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in FACTS:
        (folder / f"{kind}.txt").write_text("\n\n".join(f"{kind} of {name}: {fact(kind, name)}" for name in names))


def main() -> None:
    given = read_arguments(__doc__)
    pieces = [CALL, CALLED, *FACTS, *(f"[{kind}.txt] " for kind in FACTS), " of ", ": "]
    rows, names = make_rows(given.seed)
    write_task(given.folder, make_tokenizer("search", pieces, string.ascii_lowercase + " "), given.seed, rows)
    write_texts(given.folder / "texts", names)


if __name__ == "__main__":
    main()
