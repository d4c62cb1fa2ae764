"""Search: what is found in which order, against BM25 as its paper has it, and how texts are cut."""

import math
import re
import sys

import pytest

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.turns.tools.functions import ToolEntry
from hybrid_grpo.turns.tools.search import passages_of, search_tool

TEXTS = {
    "b/bern.md": "The Aare flows around the old town.\n\nBern has 134,794 people, and bears.",
    "a/basel.txt": "The Rhine flows through Basel.\n\nThe old town of Basel has a fair; the fair is old.",
    "notes.csv": "bears bears bears",
    "c.txt": "Bears sleep. Bears eat.",
}


@pytest.fixture
def folder(tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def bm25(query, documents, k1=1.5, b=0.75):
    """Scores by the formula, with Lucene's inverse document frequency."""
    words = [re.findall(r"\w+", text.casefold()) for text in documents]
    mean = sum(map(len, words)) / len(words)
    scores = []
    for of_document in words:
        score = 0.0
        for word in re.findall(r"\w+", query.casefold()):
            having = sum(word in other for other in words)
            count = of_document.count(word)
            idf = math.log(1 + (len(words) - having + 0.5) / (having + 0.5))
            score += idf * count / (count + k1 * (1 - b + b * len(of_document) / mean))
        scores.append(score)
    return scores


@pytest.mark.parametrize("query", ["old town", "bears", "Basel fair", "THE", "a bern people", "the the the fair"])
def test_passages_are_in_the_order_of_their_scores(folder, query):
    names = ["a/basel.txt", "b/bern.md", "c.txt"]
    passages = [(name, passage) for name in names for passage in TEXTS[name].split("\n\n")]
    scores = bm25(query, [f"{name} {passage}" for name, passage in passages])
    order = sorted((place for place in range(len(passages)) if scores[place]), key=lambda place: -scores[place])
    expected = "\n\n".join(f"[{passages[place][0]}] {passages[place][1]}" for place in order[:2])
    assert search_tool(str(folder), results=2, letters=60)(query) == expected


def test_what_is_in_no_passage_is_not_found(folder):
    search = search_tool(str(folder))
    assert {search(query) for query in ("", "?!", "zurich")} == {"nothing found"}


@pytest.mark.parametrize(
    ("text", "letters", "passages"),
    [
        ("one\n\ntwo\n \nthree", 8, ["one\n\ntwo", "three"]),
        ("one\n\ntwo", 7, ["one", "two"]),
        ("one two three", 7, ["one two", "three"]),
        ("onetwothree four", 5, ["onetw", "othre", "e", "four"]),
        (" \n\n ", 5, []),
    ],
)
def test_passages_are_paragraphs_that_fit(text, letters, passages):
    assert list(passages_of(text, letters)) == passages


def test_the_model_is_told_of_the_query_alone(folder):
    tool = ToolEntry("search", {"folder": str(folder)}).load("rollout.tools[0]")
    assert list(tool.interface.schema["function"]["function"]["parameters"]["properties"]) == ["query"]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "kwargs folder is not set"),
        ({"folder": "no"}, "kwargs folder no: there is no such folder"),
        ({"folder": "empty"}, r"kwargs folder empty has no file that ends with \.txt or \.md"),
        ({"folder": "blank"}, "kwargs folder blank has no words in its 1 files"),
        ({"folder": "bytes"}, r"kwargs folder bytes: bytes.a\.txt is not UTF-8 text: remove it"),
        ({"folder": "a", "results": 0}, "results: .*greater than or equal to 1"),
        ({"foldr": "a"}, "kwargs foldr: there is no such argument: did you mean folder"),
    ],
)
def test_what_cannot_be_searched_is_refused(folder, monkeypatch, kwargs, message):
    monkeypatch.chdir(folder)
    for name, content in {"blank": b" \n\n", "bytes": b"\xff\xfe\xff"}.items():
        (folder / name).mkdir()
        (folder / name / "a.txt").write_bytes(content)
    (folder / "empty").mkdir()
    with pytest.raises(UserError, match=rf"^rollout\.tools\[0\] search: {message}"):
        ToolEntry("search", kwargs).load("rollout.tools[0]")


def test_without_the_library_it_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(UserError, match=r"search needs bm25s.*pip install 'hybrid_grpo\[search\]'"):
        ToolEntry("search", {"folder": str(folder)}).load("rollout.tools[0]")
