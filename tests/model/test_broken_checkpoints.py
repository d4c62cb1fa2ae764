"""Checkpoints and loads that are broken on purpose: each is named before the first step, in one line."""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import build, tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybrid_grpo.commands.verification import verified
from hybrid_grpo.config import PolicyConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.files import check_files
from hybrid_grpo.model.loading import load_config, load_model
from hybrid_grpo.model.logprobs import LogprobModel
from hybrid_grpo.policy import Policy

Weights = dict[str, Tensor]
Q, BIAS = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias"
UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SENTENCE = torch.arange(3, 19)


@functools.cache
def learned() -> Weights:
    """The weights of a model that knows one sentence by heart, after half a second of training."""
    model = build(tiny_config("llama")).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        model(SENTENCE[None], labels=SENTENCE[None]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = build(tiny_config("llama"))
    model.load_state_dict(learned())
    model.save_pretrained(tmp_path)
    return tmp_path


def started(folder: Path) -> str:
    """What a run does with a model before its first step, but for DeepSpeed. Returns the line that it prints."""
    config = PolicyConfig(model=str(folder), dtype="float32")
    check_files(config.model, load_config(config.model))
    return compared(config, load_model(config, ATTENTION))


def compared(config: PolicyConfig, model: Any) -> str:
    policy = Policy.__new__(Policy)
    policy.config, policy.packs, policy.vocabulary, policy.packed = config, True, model.config.vocab_size, False
    policy.tokenizer = lambda sentence: {"input_ids": SENTENCE.tolist()}
    policy.engine = LogprobModel(model)
    policy.engine.device, policy.engine.engine = torch.device("cpu"), SimpleNamespace(module=LogprobModel(model))
    return verified(policy)


def weights(change: Callable[[Weights], object]) -> Callable[[Path], None]:
    def broken(folder: Path) -> None:
        file = folder / "model.safetensors"
        state = load_file(file)
        change(state)
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, file, metadata={"format": "pt"})

    return broken


def put(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    return weights(lambda state: state.update({name: change(state[name])}))


def settings(**changes: Any) -> Callable[[Path], None]:
    def broken(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return broken


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def swapped(state: Weights) -> None:
    """Exchange the two layers."""
    for name in [name for name in state if ".layers.0." in name]:
        other = name.replace(".0.", ".1.")
        state[name], state[other] = state[other], state[name]


def untied(folder: Path) -> None:
    settings(tie_word_embeddings=True)(folder)


def without_shard(folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink()
    next(folder.glob("model-00002-*")).unlink()


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda weight: weight * factor


FILES = {
    "missing tensor": (weights(lambda state: state.pop(UP)), f"lacks 1 of the weights .*, {UP} among them: take a com"),
    "renamed tensor": (weights(lambda state: state.update({UP + "s": state.pop(UP)})), f"lacks 1 .*, {UP} among them"),
    "extra tensor": (weights(lambda state: state.update({"model.more": torch.ones(2)})),
                     "has 1 weights beside those that its config.json asks for, model.more among them: take .*save_p"),
    "bias that config.json turns off": (weights(lambda state: state.update({BIAS: torch.ones(32)})),
                                        r"has 1 weights beside .* model.layers.0.self_attn.q_proj.bias among them"),
    "transposed": (put(UP, lambda weight: weight.T), rf"{UP} has the shape \[32, 64\] in its files, and .* \[64, 32\]"),
    "wrong shape": (put(NORM, lambda weight: weight[:16]), rf"{NORM} has the shape \[16\] in its files"),
    "NaN": (put(UP, scaled(float("nan"))), f"1 of its weights hold NaN or infinity, {UP} among them: use an intact"),
    "infinity": (put(NORM, scaled(float("inf"))), f"1 of its weights hold NaN or infinity, {NORM} among them"),
    "integers": (put(UP, lambda weight: weight.to(torch.int8)), f"{UP} is stored as I8, .* F32"),
    "truncated file": (cut_short, "model.safetensors is not a safetensors file, or is cut short: .*: copy it again"),
    "lost shard": (without_shard, "model.safetensors.index.json names model-00002-.*, which is missing: copy it as"),
    "lost layer": (weights(lambda state: [state.pop(name) for name in list(state) if ".layers.1." in name]),
                   "lacks 9 of the weights that its config.json asks for, model.layers.1.input_layernorm.weight, "),
    "layers that config.json cuts": (settings(num_hidden_layers=1), "has 9 weights beside those that its config.json"),
    "vocabulary cut": (put(EMBEDDING, lambda weight: weight[:50]), rf"{EMBEDDING} has the shape \[50, 32\]"),
    "wrong heads": (settings(num_key_value_heads=4), r"k_proj.weight has the shape \[16, 32\] .* asks for \[32, 32\]"),
    "unknown rotary type": (settings(rope_parameters={"rope_type": "none", "rope_theta": 1e4}), "describes no model"),
    "tied head untied": (untied, "config.json ties lm_head.weight to the embedding, and the files hold different val"),
    "norms of 0": (weights(lambda state: state.update({n: 0 * w for n, w in state.items() if "norm" in n})),
                   "gives every token the same probability: its last norm or its output head is 0: use an intact copy"),
    "head of 0": (put(HEAD, scaled(0.0)), "gives every token the same probability"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_broken_files_are_refused_by_name(name, folder):
    broken, message = FILES[name]
    broken(folder)
    with pytest.raises(UserError) as refused:
        started(folder)
    assert re.search(message, str(refused.value)), refused.value
    assert str(refused.value).startswith(f"policy.model {folder}") and "\n" not in str(refused.value)


def test_an_intact_model_is_as_in_transformers_and_knows_its_sentence(folder):
    line = started(folder)
    assert re.match(r"as in transformers' own model \(at most \de-0\d nats apart\); a sentence takes 0.\d\d nats", line)
    assert line.endswith(" per token, and guessing 4.11")


@pytest.mark.parametrize(
    "broken",
    [
        settings(rope_parameters={"rope_type": "default", "rope_theta": 3.0}),
        settings(rope_parameters={"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}),
        weights(swapped),
        put(Q, lambda weight: weight.T),
        weights(lambda state: state.update({Q: state[Q].roll(8, 0)})),
    ],
    ids=["rotary base", "rotary type", "layers swapped", "square transposed", "heads shuffled"],
)
def test_files_that_fit_and_are_wrong_show_in_what_the_sentence_takes(broken, folder):
    """transformers reads them in the same way, so that no comparison can tell."""
    broken(folder)
    nats = float(re.search(r"takes ([\d.]+) nats", started(folder))[1])
    assert nats > 1.0


def halve_rotary(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def in_bfloat16(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.bfloat16()


def transpose(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj.weight.data = model.model.layers[0].self_attn.q_proj.weight.data.T


def swap_layers(model: Any) -> None:
    model.model.layers[0].mlp, model.model.layers[1].mlp = model.model.layers[1].mlp, model.model.layers[0].mlp


@pytest.mark.parametrize("spoil", [halve_rotary, in_bfloat16, transpose, swap_layers])
def test_what_loading_did_to_a_model_shows_next_to_transformers_own(spoil, tmp_path):
    build(tiny_config("llama", hidden=128)).save_pretrained(tmp_path)
    config = PolicyConfig(model=str(tmp_path), dtype="float32")
    model = load_model(config, ATTENTION)
    spoil(model)
    message = r"log-probabilities differ by up to [\d.]+ nats from those of .* or set policy.verify to off"
    with pytest.raises(UserError, match=message):
        compared(config, model)
    off = PolicyConfig(model=str(tmp_path), dtype="float32", verify="off")
    assert compared(off, model) == "not compared with transformers' own model (policy.verify off)"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (halve_rotary, "its buffer model.rotary_emb.inv_freq was changed while it was loaded"),
        (in_bfloat16, r"its buffer model.rotary_emb.inv_freq .* \(torch.bfloat16, torch.float32 by its class\)"),
    ],
    ids=["rotary base", "rotary in bfloat16"],
)
def test_a_load_that_changes_the_model_is_refused(spoil, message, folder, monkeypatch):
    load = AutoModelForCausalLM.from_pretrained

    def spoiled(*given: Any, **options: Any) -> Any:
        model, noted = load(*given, **options)
        spoil(model)
        return model, noted

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spoiled)
    with pytest.raises(UserError, match=message):
        load_model(PolicyConfig(model=str(folder), dtype="float32"))


def test_a_large_model_is_compared_on_request_only(folder, monkeypatch):
    monkeypatch.setattr("hybrid_grpo.commands.verification._LARGEST", 1000)
    config = PolicyConfig(model=str(folder), dtype="float32")
    model = load_model(config, ATTENTION)
    assert compared(config, model).endswith("B parameters; policy.verify on does)")
    on = PolicyConfig(model=str(folder), dtype="float32", verify="on")
    assert compared(on, model).startswith("as in transformers' own model")
