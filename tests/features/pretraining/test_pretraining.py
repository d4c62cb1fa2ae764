"""The pretraining loss beside what the policy learns from its rollouts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from char_tokenizer import char_tokenizer
from launching import ranks
from tiny_models import build, tiny_config

from hybrid_grpo.features.pretraining.pretraining import PretrainingLoss


@pytest.mark.ranks
def test_the_gradient_of_a_step_is_the_sum_of_both_losses_gradients(tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    build(tiny_config("qwen2", vocab_size=len(tokenizer))).save_pretrained(tmp_path / "model")
    (seen,) = ranks(1, "gradients", tmp_path, programs=str(Path(__file__).with_name("programs.py")))
    assert seen["error"] < 3e-6 and min(seen["largest"]) > 1e-3, seen
    assert seen["loss"][0] == pytest.approx(seen["loss"][1], rel=1e-5)
    first, second = seen["batches"]
    assert first != second and seen["position"] == len(first + second) == 10, "each optimizer step draws its own rows"
    assert "6 texts in 11 rows of 50 tokens, weight 0.3" in seen["read"]


def test_every_token_but_the_first_is_learned_with_the_weight_and_the_loss_is_a_mean_over_tokens() -> None:
    def learn(prompts: Any, completions: Any, beat: Any, coef: float) -> Any:
        assert (prompts, completions, coef) == ([[1], [4]], [[2, 3], [5, 6, 7, 8]], 0.3)
        for loss, row in zip((2.0, 0.5), completions, strict=True):
            beat()
            yield loss, len(row)

    pretraining, beats = object.__new__(PretrainingLoss), list[None]()
    pretraining._coef = 0.3
    rows = [([1, 2, 3], 0), ([4, 5, 6, 7, 8], 1)]
    pretraining._loader = SimpleNamespace(next_batch=lambda: rows)  # type: ignore[assignment]
    policy: Any = SimpleNamespace(learn=learn)
    assert pretraining.gradient(policy, lambda: beats.append(None)) == {"ptx/loss": (1.0, 6)}
    assert len(beats) == 2
