"""The tool `search`, which finds passages in the text files of a folder by BM25 (Robertson and Zaragoza 2009, "The
Probabilistic Relevance Framework: BM25 and Beyond", in Lucene's variant).

The folder is read once, before worker processes are forked, so that all of them share one index.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.fields import SECTION, Count, Text, checked_settings

_ENDINGS = (".txt", ".md")
_WORD = re.compile(r"\w+")
NOTHING = "nothing found"


@dataclass(frozen=True, config=SECTION)
class _Settings:
    folder: Text
    results: Count
    letters: Count


def search_tool(folder: str | None = None, results: int = 3, letters: int = 1000) -> Callable[[str], str]:
    """Return the tool, which returns the best passages, best first, each preceded by the name of its file. Ties are in
    the order of files and passages, so that a query always has the same answer.

    Raises ValueError if there is nothing to search, or bm25s is not installed.

    Args:
        folder: folder of text files (.txt, .md), including those in folders below it.
        results: maximum number of passages that a search returns.
        letters: maximum number of characters in a passage; see `passages_of`.
    """
    refuse(folder is None, "kwargs folder is not set: name the folder of the texts that are to be searched")
    settings = checked_settings(_Settings, folder, results, letters)
    try:
        import bm25s
    except ImportError:
        refuse(True, "search needs bm25s, which is not installed: pip install 'hybrid_grpo[search]'")
    passages = _read(settings)
    index: Any = bm25s.BM25()
    # The words of a file's name, often the subject of its text, are indexed as well.
    index.index([_words(f"{name} {text}") for name, text in passages], show_progress=False)

    def search(query: str) -> str:
        """
        Search a collection of texts for passages.

        Args:
            query: words that the passages have.
        """
        words = _words(query)
        if not words:
            return NOTHING
        scores = index.get_scores(words)
        found = np.flatnonzero(scores > 0)
        best = found[np.argsort(-scores[found], kind="stable")[:results]]
        return "\n\n".join("[{}] {}".format(*passages[number]) for number in best) or NOTHING

    return search


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _read(settings: _Settings) -> list[tuple[str, str]]:
    """Return all passages, each with the path of its file in the folder."""
    folder = Path(settings.folder).expanduser()
    refuse(not folder.is_dir(), f"kwargs folder {settings.folder}: there is no such folder")
    files = sorted(path for path in folder.rglob("*") if path.suffix in _ENDINGS and path.is_file())
    refuse(not files, f"kwargs folder {settings.folder} has no file that ends with {' or '.join(_ENDINGS)}: add some")
    passages: list[tuple[str, str]] = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            refuse(True, f"kwargs folder {settings.folder}: {path} is not UTF-8 text: remove it, or convert it")
        passages += [(path.relative_to(folder).as_posix(), passage) for passage in passages_of(text, settings.letters)]
    refuse(
        not any(_WORD.search(text) for _, text in passages),
        f"kwargs folder {settings.folder} has no words in its {len(files)} files: give others",
    )
    return passages


def passages_of(text: str, letters: int) -> Iterator[str]:
    """Split a text into passages of at most `letters` characters: consecutive paragraphs that fit together, and parts
    of paragraphs that do not fit, cut between words if possible."""
    passage = ""
    for paragraph in re.split(r"\n\s*\n", text):
        for part in _parts(paragraph.strip(), letters):
            if passage and len(passage) + 2 + len(part) > letters:
                yield passage
                passage = ""
            passage = f"{passage}\n\n{part}" if passage else part
    if passage:
        yield passage


def _parts(paragraph: str, letters: int) -> Iterator[str]:
    while len(paragraph) > letters:
        # A space right after the part counts, so that a word that just fits is kept.
        cut = max(paragraph.rfind(" ", 0, letters + 1), paragraph.rfind("\n", 0, letters + 1))
        cut = cut if cut > 0 else letters
        yield paragraph[:cut].rstrip()
        paragraph = paragraph[cut:].lstrip()
    if paragraph:
        yield paragraph
