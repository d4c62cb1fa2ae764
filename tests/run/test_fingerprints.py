"""Inputs that changed while a run waited are known by their fingerprints."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from workshop import REWARDS, Workshop

from hybrid_grpo.config import TrainConfig, build
from hybrid_grpo.config.checks import check_train
from hybrid_grpo.data.batch import Prompt
from hybrid_grpo.model import fingerprints
from hybrid_grpo.run.feature import make_features
from hybrid_grpo.run.fingerprints import _files, _text, source_file
from hybrid_grpo.run.inputs import RunInputs

SETTINGS = {
    "policy": {"model": "model"},
    "data": {"path": "train.jsonl", "eval_path": "heldout.jsonl"},
    "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_tokens": 8},
    "rewards": [{"function": "my_rewards.py:early_letters"}, {"function": "exact_match"}],
}


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    workshop = Workshop(tmp_path)
    yield workshop
    workshop.close()


def taken() -> dict[str, str]:
    config = build(TrainConfig, SETTINGS)
    inputs = RunInputs.read(config)
    make_features(config, check_train(config, 1), inputs)
    return inputs.fingerprints(config)()


def test_the_fingerprint_of_rows_is_that_of_runs_of_earlier_versions() -> None:
    """What a run adds to a prompt is not part of it: a resumed run would find other inputs."""
    prompt = Prompt(3, "a=", [1, 2], {"answer": "b"}, first_step=4)
    assert json.loads(_text(prompt)) == {"columns": {"answer": "b"}, "epoch": 0, "id": 3, "source": "", "text": "a="}


def edited(path: str, change) -> None:
    document = json.loads(Path(path).read_text())
    change(document)
    Path(path).write_text(json.dumps(document))


def swap_tokens(tokenizer) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    one, other = [token for token in vocabulary if token.isalpha() and len(token) == 1][:2]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]


def other_weights(path: str) -> None:
    save_file({name: tensor + 0.01 for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def other_row(path: str) -> None:
    lines = Path(path).read_text().splitlines()
    Path(path).write_text("\n".join([*lines[1:], lines[0]]) + "\n")


@pytest.mark.process
def test_each_input_that_changes_is_named(workshop):
    before = taken()
    assert taken() == before, "the same inputs"
    changes = {
        "training rows": lambda: other_row("train.jsonl"),
        "held-out rows of": lambda: other_row("heldout.jsonl"),
        "policy.model tokenizer": lambda: edited("model/tokenizer.json", swap_tokens),
        "policy.model configuration": lambda: edited("model/config.json", lambda c: c.update(rope_theta=5e5)),
        "policy.model weights": lambda: other_weights("model/model.safetensors"),
        "chat template": lambda: Path("model/chat_template.jinja").write_text("{{ messages }}"),
        "code of rewards: my_rewards.py": lambda: Path("my_rewards.py").write_text(REWARDS + "# more\n"),
    }
    for name, change in changes.items():
        change()
        now = taken()
        differ = [known for known in now if now[known] != before.get(known)]
        # The template belongs to the tokenizer's files as well.
        assert all(known.startswith((name, "policy.model tokenizer")) for known in differ), (name, differ)
        assert any(known.startswith(name) for known in differ), (name, differ)
        before = now
    assert not any("exact_match" in name for name in before)


def test_a_large_file_of_weights_is_known_by_a_block_of_every_tensor(tmp_path, monkeypatch):
    """Without reading it whole; another tensor of the same shape is seen, however small it is beside the others."""
    monkeypatch.setattr(fingerprints, "_WHOLE_BYTES", 0)
    tensors = {"large": torch.zeros(1 << 20), "small": torch.zeros(4)}
    seen = set()
    for change in ({}, {"small": torch.ones(4)}, {"large": torch.ones(1 << 20)}):
        save_file({**tensors, **change}, tmp_path / "model.safetensors")
        seen.add(fingerprints.of_file(tmp_path / "model.safetensors"))
    assert len(seen) == 3
    save_file(tensors, tmp_path / "model.safetensors")
    assert fingerprints.of_file(tmp_path / "model.safetensors") in seen
    for content in (b"", b"\xff" * 9, bytes(range(256)) * 8192):
        (tmp_path / "model.safetensors").write_bytes(content)
        shutil.copy(tmp_path / "model.safetensors", tmp_path / "pytorch_model.bin")
        assert fingerprints.of_file(tmp_path / "model.safetensors") != fingerprints.of_file(
            tmp_path / "pytorch_model.bin"
        )


def test_files_of_features_may_be_patterns_and_folders(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(name)
    for path, files in ((tmp_path, 2), (tmp_path / "*.jsonl", 2), (tmp_path / "a.jsonl", 1), ("owner/rows", 0)):
        writer = {"name": "g", "path": str(path), "weight": "baseline"}
        given = {"data": {"path": "x.jsonl"}, "rewards": ["exact_match"], "guests": {"writers": [writer]}}
        assert len(_files(build(TrainConfig, given))) == files


def test_where_the_code_of_a_function_is():
    place = Path(fingerprints.__file__)
    assert source_file("hybrid_grpo.model.fingerprints:of_model") == source_file(fingerprints.of_model) == place
    assert source_file(f"{place}:of_model") == place
    assert [source_file(name) for name in ("exact_match", "no.such:thing", "missing.py:f", "sys:exit")] == [None] * 4
