"""Completions that exist already, read from rows and from the rollouts of a run."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from char_tokenizer import TEMPLATE, char_tokenizer, ids

from hybrid_grpo.config import DataConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.batch import Completion, Prompt, Rollout, Scores
from hybrid_grpo.data.completions import read_completions, read_step, unended_turn
from hybrid_grpo.records.sinks import rollout_lines

NAN = math.nan


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("value", [3, [], [[]], ["a", 3], [{"role": "user", "content": "?"}]])
def test_what_is_no_completion_is_named_by_its_row(tmp_path: Path, value: Any) -> None:
    rows = [{"prompt": "", "completion": "a"}, {"prompt": "", "completion": value}]
    path = tmp_path / "odd.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"completion: row 1 \(from 0\) of .*odd.jsonl has .*: give text, or a chat"):
        read_completions(str(path), DataConfig(), [])


def test_a_saved_step_is_the_step_that_was(tmp_path):
    """Tokens are made of the text again, the one that ended it included; what is not in the text is unknown."""
    prompts = [Prompt(4, "ab=", [1], {"answer": "b"}), Prompt(5, [{"role": "user", "content": "?"}], [1], {})]
    tokens = [ids("ab", "<eos>"), ids("abc"), ids("a", "<pad>", "b"), ids("c", "<eos>")]
    texts, finish = ["ab", "abc", "ab", "c"], ["stop", "length", "length", "stop"]
    rows = [Completion(t, [-1.0] * len(t), f, text) for t, f, text in zip(tokens, finish, texts, strict=True)]
    scores = Scores(
        f64(0.1, NAN, 1 / 3, 2),
        {"f": f64(0.1, NAN, NAN, 2)},
        {"f": torch.tensor([0, 2, 1, 0], dtype=torch.int8)},
        failures={"f": [None, "raised", None, None]},
    )
    lines = rollout_lines(3, Rollout(prompts, rows, 2), scores, f64(0.1, 0.0, 1 / 3, -2))
    (tmp_path / "s.jsonl").write_text("\n".join(lines) + "\n")
    rollout, saved = read_step(tmp_path / "s.jsonl", char_tokenizer())
    assert rollout.num_generations == 2 and [p.text for p in rollout.prompts] == [p.text for p in prompts]
    assert rollout.prompts[0].columns == {"answer": "b"}
    assert [c.token_ids for c in rollout.completions] == [tokens[0], tokens[1], [*ids("ab"), -1], tokens[3]]
    assert [row["reward"] for row in saved] == [0.1, None, 1 / 3, 2]
    assert [row["rewards"] for row in saved] == [{"f": 0.1}, {"f": None}, {"f": None}, {"f": 2}]
    assert read_step(tmp_path / "s.jsonl")[0].lengths == [3, 3, 3, 2]


@pytest.mark.parametrize(
    ("after", "ends", "strings", "warning"),
    [
        ("<system> ", ["<eos>"], ["m"], r"ends an answer with '<system>', .*: set rollout.stop_ids \[4\]$"),
        ("<system> ", ["<eos>", "<system>"], [], None),
        ("<system><eos>", ["<eos>"], [], None),
        ("END ", ["<eos>"], [], r"ends an answer with 'END', .*: set rollout.stop_strings \['END'\]$"),
        ("END ", ["<eos>"], ["END"], None),
        (" ", ["<eos>"], [], None),
    ],
)
def test_an_end_of_turn_that_ends_nothing_is_warned_of(after, ends, strings, warning):
    """Completions ran into the next turn, and the end of the first was not in their text, since it is special."""
    template = TEMPLATE.replace("{{ message.content }}", "{{ message.content }}" + after)
    found = unended_turn(char_tokenizer(template), ids(*ends), strings)
    assert re.search(warning, found) if warning else not found
