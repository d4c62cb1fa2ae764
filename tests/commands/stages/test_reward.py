"""The reward model stage: its loss against definitions in float64, and runs on one rank, on two, resumed, with LoRA."""

import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
import torch
from char_tokenizer import IDS, TEMPLATE, char_tokenizer
from forks import Done
from peft import PeftModel
from safetensors.torch import load_file
from tiny_models import build, tiny_config
from transformers import AutoModelForSequenceClassification

from hybrid_grpo.commands.stages.reward import calibration_bins, calibration_error, pair_losses
from hybrid_grpo.data.packing import pack_pairs
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.scalar_model import ScalarModel
from hybrid_grpo.records.json_lines import read_jsonl
from hybrid_grpo.rewards.models.reward_model import reward_model

CPU = torch.device("cpu")


def test_the_loss_of_a_model_and_its_gradients_are_those_of_the_definition():
    """The definition: float64, each text alone through transformers' classifier, the loss written out."""
    config = tiny_config("qwen2", num_labels=1)
    trunk = build(config)
    theirs, ours = (
        AutoModelForSequenceClassification.from_config(deepcopy(config), attn_implementation=attention).to(dtype).eval()
        for attention, dtype in (("eager", torch.float64), (ATTENTION, torch.float32))
    )
    for model in (theirs, ours):
        model.load_state_dict(trunk.state_dict() | {"score.weight": torch.linspace(-1, 1, 32)[None]}, strict=False)
    rng = random.Random(0)
    pairs = []
    for _ in range(7):
        start = [rng.randrange(60) for _ in range(rng.randint(1, 9))]
        pairs.append(tuple(start + [rng.randrange(60) for _ in range(rng.randint(1, 9))] for _ in range(2)))
    margins, center = torch.linspace(-0.5, 1.5, 7), 0.3

    expected = 0.0
    for (chosen, rejected), margin in zip(pairs, margins.double(), strict=True):
        r_chosen, r_rejected = (theirs(torch.tensor([text])).logits.squeeze() for text in (chosen, rejected))
        expected += torch.log1p(torch.exp(-(r_chosen - r_rejected - margin))) / 7
        expected += center * (r_chosen + r_rejected) ** 2 / 7
    expected.backward()

    model, total = ScalarModel(ours), 0.0
    batches = pack_pairs(pairs, 40, CPU, share="on")
    assert len(batches) > 1
    for micro in batches:
        score_N = model(micro.input_ids_bS, micro.position_ids, micro.source, micro.segments)
        chosen_p, rejected_p = score_N.view(-1, 2).unbind(1)
        loss = pair_losses(chosen_p, rejected_p, margins[[row // 2 for row in micro.rows[::2]]], center).sum() / 7
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(float(expected), rel=1e-6)
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        largest = float(gradients[name].abs().max())
        difference = float((parameter.grad.double() - gradients[name]).abs().max())
        assert largest > 0 and difference <= 1e-5 * largest, name


def test_the_loss_and_its_gradient_to_1e_6_where_differences_are_large_too():
    chosen, rejected, margin = np.random.default_rng(0).normal(size=(3, 200)) * np.array([[8.0], [8.0], [1.0]])
    rewards = [torch.tensor(x, dtype=torch.float32, requires_grad=True) for x in (chosen, rejected)]
    loss_p = pair_losses(*rewards, torch.tensor(margin, dtype=torch.float32), 0.01)
    loss_p.sum().backward()
    difference = chosen - rejected - margin
    defined = np.logaddexp(0, -difference) + 0.01 * (chosen + rejected) ** 2
    slope = -1 / (1 + np.exp(difference))
    np.testing.assert_allclose(loss_p.detach(), defined, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(rewards[0].grad, slope + 0.02 * (chosen + rejected), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(rewards[1].grad, -slope + 0.02 * (chosen + rejected), rtol=1e-6, atol=1e-6)


def test_the_calibration_error_is_its_definition_and_small_for_a_model_that_is_right_as_often_as_it_says():
    rng = np.random.default_rng(0)
    difference = rng.normal(size=20_000) * 2
    # Nature prefers the first text with the probability that the model says: where not, the second one was chosen.
    flipped = rng.random(20_000) > 1 / (1 + np.exp(-difference))
    honest = torch.tensor(np.where(flipped, -difference, difference))
    errors = []
    for measured in (honest, 3 * honest):
        right, confidence = (measured > 0).numpy(), 1 / (1 + np.exp(-measured.abs().numpy()))
        number = np.minimum(((confidence - 0.5) * 20).astype(int), 9)
        expected = sum(
            (number == k).mean() * abs(right[number == k].mean() - confidence[number == k].mean()) for k in range(10)
        )
        bins = sum(calibration_bins(part) for part in measured.split(7_000))
        errors.append(calibration_error(bins))
        assert errors[-1] == pytest.approx(expected, abs=1e-9)
    assert errors[0] < 0.015 and errors[1] > 0.08


def test_a_model_that_has_diverged_is_measured_too_so_that_the_guard_can_say_so():
    """The NaN of a difference was taken for the number of a bin."""
    assert np.isnan(calibration_error(calibration_bins(torch.tensor([1.0, torch.nan, -torch.inf]))))


def make(folder: Path) -> None:
    """A tiny language model, and pairs of sorted and unsorted letters: chats with margins, and text."""
    model = build(tiny_config("qwen2", vocab_size=len(IDS), initializer_range=0.05))
    model.save_pretrained(folder / "model")
    char_tokenizer(TEMPLATE).save_pretrained(folder / "model")
    rng = random.Random(0)

    def row(number: int) -> dict[str, Any]:
        word = "".join(rng.sample("abcdefghijkl", rng.randint(3, 7)))
        answers = {"chosen": "".join(sorted(word)), "rejected": word[::-1] if number % 3 else word + "."}
        if number % 2:
            return {"prompt": f"{word}:", **answers}
        messages = {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
        return {"prompt": [{"role": "user", "content": word}], **messages, "margin": 0.25}

    for name, count in (("pairs", 41), ("heldout", 13)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row(number)) + "\n" for number in range(count)))


def train(folder: Path, name: str, *options: str, world: int = 1) -> tuple[Done, Path]:
    """A run of 4 steps, with a checkpoint after 2."""
    shared = {
        **{"policy.model": "model", "policy.dtype": "float32", "policy.lr": "0.01", "policy.micro_batch_tokens": "50"},
        **{"data.path": "pairs.jsonl", "data.eval_path": "heldout.jsonl", "eval.every": "2"},
        **{"reward.batch_size": "6", "reward.center_coefficient": "0.01", "run.steps": "4", "run.name": name},
        **{"checkpoint.every": "2", "checkpoint.keep": "9", "engine.adam": "torch", "log.wandb": "disabled"},
    }
    settings = [f"--{setting}={value}" for setting, value in shared.items()]
    done = forks.run("-m", "hybrid_grpo", "reward", *settings, *options, world=world, cwd=folder)
    assert done.status == 0, done.err
    return done, folder / "runs" / name


def numbers(run: Path) -> list[dict[str, float]]:
    """What every step measured, but for times and memory."""
    lines = read_jsonl(run / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k.split("/")[0] in ("step", "reward_model", "policy")} for line in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one rank."""
    folder = tmp_path_factory.mktemp("reward")
    make(folder)
    return train(folder, "alone", "--engine.zero_stage=0")[1]


@pytest.mark.ranks
def test_what_is_exported_is_a_reward_model_that_measures_as_the_run_did(alone: Path) -> None:
    rows = [json.loads(line) for line in (alone / "../../heldout.jsonl").read_text().splitlines()]
    prompts = [row["prompt"] for row in rows for _ in range(2)]
    answers = [row[name] for row in rows for name in ("chosen", "rejected")]
    rewards = reward_model(prompts, answers, model=str(alone / "model"))
    difference = np.array(rewards[::2]) - np.array(rewards[1::2])
    margin = np.array([row.get("margin", 0.0) for row in rows])
    centered = 0.01 * (np.array(rewards[::2]) + np.array(rewards[1::2])) ** 2
    last = numbers(alone)[-1]
    assert last["reward_model/heldout_accuracy"] == pytest.approx((difference > 0).mean())
    loss = np.logaddexp(0, margin - difference) + centered
    assert last["reward_model/heldout_loss"] == pytest.approx(loss.mean(), 1e-5)
    bins = calibration_bins(torch.tensor(difference))
    assert last["reward_model/heldout_calibration"] == pytest.approx(calibration_error(bins), 1e-4)
    losses = [line["reward_model/heldout_loss"] for line in numbers(alone) if "reward_model/heldout_loss" in line]
    assert len(losses) == 3 and losses[-1] < losses[0] - 0.05, "before the first step, after the second and the last"
    config = json.loads((alone / "model/config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"] and len(config["id2label"]) == 1
    assert config["pad_token_id"] == IDS["<pad>"]


@pytest.mark.ranks
def test_two_ranks_with_sharded_weights_are_one(alone: Path) -> None:
    """Six pairs a step in micro-batches of two or three, and seven and six held-out pairs."""
    _, both = train(alone.parent.parent, "both", "--engine.zero_stage=3", world=2)
    for one, two in zip(numbers(alone), numbers(both), strict=True):
        assert two == pytest.approx(one, rel=1e-5, abs=1e-5)
    weights = [load_file(run / "model/model.safetensors") for run in (alone, both)]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.ranks
def test_a_resumed_run_is_the_same_to_the_bit(alone: Path) -> None:
    checkpoint = f"--run.resume={alone / 'checkpoints/step_000002'}"
    _, resumed = train(alone.parent.parent, "resumed", checkpoint, "--engine.zero_stage=0")
    assert numbers(resumed) == numbers(alone)
    weights = [load_file(run / "model/model.safetensors") for run in (alone, resumed)]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


@pytest.mark.ranks
def test_adapters_and_the_head_are_trained_and_exported_merged_and_for_peft(alone: Path) -> None:
    done, run = train(alone.parent.parent, "adapted", "--lora.rank=2", "--engine.zero_stage=2")
    assert "in adapters of rank 2 for 14 linear layers, and the head (score)" in done.out
    start, trained = (load_file(f / "model.safetensors") for f in (alone / "../../model", run / "model"))
    changed = {name for name in trained if name not in start or not torch.equal(start[name], trained[name])}
    assert changed == {name for name in trained if name.endswith("_proj.weight")} | {"score.weight"}
    merged = AutoModelForSequenceClassification.from_pretrained(run / "model").eval()
    base = AutoModelForSequenceClassification.from_pretrained(alone / "../../model", num_labels=1)
    adapted = PeftModel.from_pretrained(base, run / "model/adapter").eval()
    ids = torch.tensor([[7, 8, 9, 10]])
    with torch.no_grad():
        base.config.pad_token_id = adapted.config.pad_token_id = merged.config.pad_token_id
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=1e-5, atol=1e-5)
