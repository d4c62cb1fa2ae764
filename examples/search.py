"""A tool that searches the text files of a folder, ranked by BM25 (https://doi.org/10.1561/1500000019):

rollout:
  tools:
    - {function: examples/search.py:search, kwargs: {folder: texts}}
  max_turns: 4
"""

import functools
import math
import re
from collections import Counter
from pathlib import Path


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


@functools.cache  # each worker process reads the folder once
def read(folder: str) -> list[tuple[str, Counter[str]]]:
    """Return the paragraphs of all .txt and .md files, each with the counts of its words."""
    files = sorted(path for path in Path(folder).rglob("*") if path.suffix in (".txt", ".md"))
    paragraphs = [part.strip() for file in files for part in re.split(r"\n\s*\n", file.read_text(encoding="utf-8"))]
    return [(text, Counter(words(text))) for text in paragraphs if words(text)]


def search(query: str, folder: str, results: int = 3) -> str:
    """
    Search a collection of texts for paragraphs.

    Args:
        query: words that the paragraphs have.
        folder: folder of the texts.
        results: maximum number of paragraphs.
    """
    paragraphs = read(folder)
    length = sum(counts.total() for _, counts in paragraphs) / len(paragraphs)
    scores = [0.0] * len(paragraphs)
    for word in words(query):
        having = sum(word in counts for _, counts in paragraphs)
        idf = math.log(1 + (len(paragraphs) - having + 0.5) / (having + 0.5))
        for at, (_, counts) in enumerate(paragraphs):
            scores[at] += idf * counts[word] / (counts[word] + 0.375 + 1.125 * counts.total() / length)
    best = sorted((at for at, score in enumerate(scores) if score), key=lambda at: -scores[at])[:results]
    return "\n\n".join(paragraphs[at][0] for at in best) or "nothing found"
