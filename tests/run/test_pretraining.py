"""The pretraining loss beside what the policy learns from its rollouts."""

from __future__ import annotations

from pathlib import Path

import pytest
from char_tokenizer import char_tokenizer
from launching import ranks
from tiny_models import build, tiny_config


@pytest.mark.ranks
def test_the_gradient_of_a_step_is_the_sum_of_both_losses_gradients(tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    build(tiny_config("qwen2", vocab_size=len(tokenizer))).save_pretrained(tmp_path / "model")
    (seen,) = ranks(1, "gradients", tmp_path, programs="pretraining_programs.py")
    assert seen["error"] < 1e-6 and min(seen["largest"]) > 1e-3, seen
    assert seen["loss"][0] == pytest.approx(seen["loss"][1], rel=1e-5)
    first, second = seen["batches"]
    assert first != second and seen["position"] == len(first + second) == 10, "each optimizer step draws its own rows"
    assert "6 texts in 11 rows of 50 tokens, weight 0.3" in seen["read"]
