"""Near duplicates in rows whose similarity is known by counting."""

import pytest

from hybrid_grpo.features.cleaning.duplicates import NearTexts, Sketches, is_common, shingles


def spread(words, at):
    """Rows that have nothing in common with each other."""
    return [f"{' '.join(f'w{row}n{word}' for word in range(words))}" for row in range(at)]


def test_words_that_most_texts_have_are_not_compared():
    rows = [f"{row} Give the final answer as a number." for row in spread(4, at=40)]
    # Four words and three pairs, and the pair of the last with the first word of the instruction.
    assert {len(own) for own in shingles(rows)} == {8}
    assert [is_common(*given, 0.2) for given in ((4, 8), (5, 8), (10, 40), (11, 40), (200, 1000), (201, 1000))] == [
        False, True, False, True, False, True,
    ]  # fmt: skip


def test_the_most_similar_text_that_was_added_is_found_with_its_exact_similarity():
    rows = [*spread(20, at=30), "", ""]
    one = rows[3].split()
    rows += [" ".join([*one[:19], "x"]), " ".join([*one[:10], *"abcdefghij"])]
    near = NearTexts(Sketches(rows), 0.5)
    for number in range(32):
        near.add(number)
    # 19 of 20 words and 18 of 19 pairs are the same, of 21 words and 20 pairs that either has.
    assert near.nearest(32) == (3, pytest.approx(37 / 41))
    assert near.nearest(33) is None  # 19 of 59
    assert near.nearest(31) is None  # has no words, as row 30 has none
    near.add(32)
    assert near.nearest(32) == (32, 1.0) and near.nearest(3) == (3, 1.0)


@pytest.mark.parametrize("similarity", [0.2, 0.5, 0.7, 0.9])
def test_texts_at_the_least_similarity_are_found(similarity):
    """Hashing is told how many texts it may miss: 2 of 100 that are just similar enough."""
    size, rows = 60, 200
    end = max(m for m in range(size) if (2 * size - 1 - 2 * m) / (2 * size - 1 + 2 * m) >= similarity)
    texts = spread(size, at=rows)
    texts += [
        " ".join([*text.split()[: size - end], *(f"x{row}n{k}" for k in range(end))]) for row, text in enumerate(texts)
    ]
    near = NearTexts(Sketches(texts), similarity)
    for number in range(rows):
        near.add(number)
    assert sum((near.nearest(rows + row) or (-1, 0.0))[0] == row for row in range(rows)) >= 0.95 * rows
