"""The tokens of saved rollouts: what is written is what was sampled, and every reader of parquet finds it."""

import datasets
import numpy as np
import pandas
import pytest
import torch
from byte_tokenizers import byte_level
from pyarrow import parquet

from hybrid_grpo.config import LogConfig
from hybrid_grpo.data.batch import Completion, Prompt, Rollout, Scores
from hybrid_grpo.distributed import ranks as distributed
from hybrid_grpo.records.sinks import Log
from hybrid_grpo.records.tokens import SCHEMA, TokenText

LOGP = [-0.1, float(np.float32(-1e-7)), -20.0]
TOKENIZER = byte_level([], merges=0)
"""A token for each byte."""


@pytest.mark.parametrize("text", ["two  words", " é of two, 🦊 of four bytes", "日本語", "<eos>a<eos>"])
def test_pieces_are_a_text_for_each_token_and_together_the_whole(text):
    ids = TOKENIZER(text)["input_ids"]
    pieces = TokenText(TOKENIZER).pieces(ids)
    assert len(pieces) == len(ids) and "".join(pieces) == text
    assert [piece for piece in pieces if piece] == (["<eos>", "a", "<eos>"] if "<eos>" in text else list(text))


def test_pieces_of_a_character_that_was_cut_are_not_lost():
    ids = TOKENIZER("a🦊")["input_ids"]
    assert TokenText(TOKENIZER).pieces(ids[:-1]) == ["a", "", "", "\ufffd"]
    assert TokenText(TOKENIZER).pieces([*ids[:3], *ids[:1]])[-1][-1] == "a", "what follows is read again"


def saved(folder, **log):
    """The file of a step of two ranks, as it was written."""
    prompts = [Prompt(7, "p", [1, 2], {}, epoch=3), Prompt(9, "q", [4], {})]
    given = ((2, TOKENIZER(" = 4. ")["input_ids"]),)
    completions = [
        Completion(TOKENIZER("aé")["input_ids"], LOGP, "stop", "aé", given),
        Completion([5], [], "length", "x", writer="file", learned=False),
        Completion([5, 6], LOGP[:2], "stop", "y"),
        Completion([7], LOGP[2:], "length", "z"),
    ]
    rollout, reward_B = Rollout(prompts, completions, 2), torch.zeros(4, dtype=torch.float64)
    scores, advantages_B = Scores(reward_B, {}, {}), torch.zeros(4)
    advantages_BT = torch.tensor([[0.1, 0.1, 0.1], [-0.3, 0, 0], [1.0, 2.0, 0], [0, 0, 0]])
    with Log(LogConfig(wandb="disabled", **log), folder, steps=9, tokenizer=TOKENIZER) as writer:
        writer.write_rollouts(3, rollout, scores, advantages_B, advantages_BT)
        writer.write_rollouts(4, rollout, scores, advantages_B)
    return folder / "rollouts" / "step_000003.parquet"


def test_every_reader_of_parquet_finds_what_was_sampled(tmp_path, monkeypatch):
    gathered = distributed.gather_objects
    monkeypatch.setattr(distributed, "gather_objects", lambda value: gathered(value) * 2)
    path = saved(tmp_path)
    rows = parquet.read_table(path).to_pylist()
    assert [row["row"] for row in rows] == [*range(8)], "of both ranks, as the lines of the other file"
    assert len((path.with_suffix(".jsonl")).read_text().splitlines()) == 8
    told = rows[0]
    assert (told["prompt_index"], told["sample"], told["prompt_id"], told["epoch"]) == (0, 0, 7, 3)
    assert told["token_ids"] == TOKENIZER("aé")["input_ids"] and told["pieces"] == ["a", "", "é"]
    assert told["given"] == [{"before": 2, "ids": TOKENIZER(" = 4. ")["input_ids"], "text": " = 4. "}]
    assert torch.tensor(told["logp"]).equal(torch.tensor(LOGP)), "float32, as the loss is given them"
    assert told["advantage"] == [float(np.float32(0.1))] * 3 and rows[2]["advantage"] == [1.0, 2.0]
    assert (rows[1]["writer"], rows[1]["logp"], rows[0]["writer"]) == ("file", [], None)
    assert parquet.read_table(path.with_name("step_000004.parquet"))["advantage"][0].as_py() is None

    frame, table = pandas.read_parquet(path), datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "c"))
    assert list(frame.columns) == table.column_names == SCHEMA.names
    assert [list(ids) for ids in frame["token_ids"]] == table["token_ids"][:] == [row["token_ids"] for row in rows]
    assert [list(logp) for logp in frame["logp"]] == [row["logp"] for row in rows]
    assert parquet.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"


def test_tokens_can_be_left_out_and_those_of_later_steps_are_removed_on_resume(tmp_path):
    assert not saved(tmp_path / "without", tokens=False).exists()
    path = saved(tmp_path)
    Log(LogConfig(wandb="disabled"), tmp_path, steps=9, done=3).close()
    assert sorted(p.name for p in path.parent.iterdir()) == ["step_000003.jsonl", "step_000003.parquet"]
