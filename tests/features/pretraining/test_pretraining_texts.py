"""Texts as rows of tokens, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from char_tokenizer import char_tokenizer, ids

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.features.pretraining.pretraining import read_texts
from hybrid_grpo.features.pretraining.settings import PtxConfig


def read(texts: list[Any], max_tokens: int, **tokenizer: Any) -> tuple[list[list[int]], str]:
    config = PtxConfig(coef=0.5, path=[{"text": text} for text in texts], max_tokens=max_tokens)
    return read_texts(config, char_tokenizer(**tokenizer))


def test_long_texts_become_rows_that_follow_each_other() -> None:
    pieces, line = read(["abcdef", "", "ab"], 3)
    assert pieces == [ids("abc"), ids("def"), ids("ab", "<eos>")], "a row of one token has nothing to predict"
    assert line == "a list [train]: 3 texts in 3 rows of 9 tokens, weight 0.5"
    assert read(["ab"], 9, adds_bos=True)[0] == [ids("<bos>", "ab", "<eos>")]
    assert read(["ab"], 9, eos=False)[0] == [ids("ab")]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a", None], r"ptx.column text: row 1 \(from 0\) of a list \[train\] has None: give text"),
        (["", ""], "no text has two tokens"),
    ],
)
def test_what_is_no_text_is_refused(texts: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(texts, 4)
