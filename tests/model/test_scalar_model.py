"""A head of one number: where it comes from, and that it is the score of transformers' classifier."""

from types import SimpleNamespace

import pytest
import torch
from char_tokenizer import IDS, char_tokenizer
from tiny_models import build, tiny_config
from transformers import AutoModelForSequenceClassification

from hybrid_grpo.config import PolicyConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.packing import pack_pairs, pad_pairs
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.scalar_model import ScalarModel, check_scalar, load_scalar_model, padding_token, scalar_config

PAIRS = [([5, 9, 3, 8, 8, 1, 7, 2, 4, 6, 11], [5, 9, 3, 8, 8, 1, 20]), ([7, 0], [7, 0, 0]), ([30] * 9, [31, 30])]
"""The second text of a pair ends where the first goes on, or ends in token 0, which padding has too; the last have no
token in common."""


@pytest.mark.parametrize("way", ["shared", "apart", "padded"])
@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", "gpt2"])
def test_a_text_has_the_score_of_transformers_at_its_last_token(architecture, way, tmp_path):
    """Gemma 2 has windows and soft caps; GPT-2's positions are learned."""
    build(tiny_config(architecture)).save_pretrained(tmp_path)
    policy = PolicyConfig(model=str(tmp_path), dtype="float32")
    model = load_scalar_model(policy, "eager" if way == "padded" else ATTENTION, seed=3)
    scored = {}
    cpu = torch.device("cpu")
    share = {"shared": "on", "apart": "off"}.get(way)
    for micro in pack_pairs(PAIRS, 25, cpu, share=share) if share else pad_pairs(PAIRS, 25, cpu):
        value_N = ScalarModel(model)(micro.input_ids_bS, micro.position_ids, micro.source, micro.segments)
        assert value_N.dtype == torch.float32
        scored |= dict(zip(micro.rows, value_N.tolist(), strict=True))
    assert len(scored) == 6
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1, attn_implementation="eager")
    theirs.load_state_dict(model.state_dict())
    # Their forward is told of no padding, and reads the last token.
    theirs.config.pad_token_id = None
    with torch.no_grad():
        for row, text in enumerate(text for pair in PAIRS for text in pair):
            assert scored[row] == pytest.approx(float(theirs.eval()(torch.tensor([text])).logits), abs=2e-5), row


def test_the_trunk_is_the_language_model_s_and_only_the_head_is_drawn(tmp_path):
    config = tiny_config("qwen2", initializer_range=0.5, hidden=256)
    start = build(config)
    start.save_pretrained(tmp_path)
    policy = PolicyConfig(model=str(tmp_path), dtype="float32")
    one, again, other = (load_scalar_model(policy, "eager", seed).state_dict() for seed in (0, 0, 1))
    head = one.pop("score.weight")
    assert set(one) == set(start.state_dict()) - {"lm_head.weight"}
    assert all(torch.equal(weight, start.state_dict()[name]) for name, weight in one.items())
    assert torch.equal(again["score.weight"], head) and not torch.equal(other["score.weight"], head)
    assert float(head.std()) == pytest.approx(0.5, rel=0.2), "the standard deviation that transformers starts it with"


def test_a_reward_model_goes_on_with_its_own_head_and_others_are_refused(tmp_path):
    def saved(architecture, labels):
        folder = tmp_path / f"{architecture}{labels}"
        config = tiny_config(architecture, num_labels=labels, pad_token_id=2)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
        return str(folder)

    folder = saved("qwen2", 1)
    head = AutoModelForSequenceClassification.from_pretrained(folder).score.weight
    model = load_scalar_model(PolicyConfig(model=folder, dtype="float32"), "eager", seed=0)
    assert torch.equal(model.score.weight, head)
    assert scalar_config(folder, padding=7).pad_token_id == 7 and check_scalar(folder).pad_token_id == 2
    with pytest.raises(UserError, match="is a classifier with 3 labels, and a reward model has 1: use a causal"):
        scalar_config(saved("qwen2", 3))
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert/config.json").write_text('{"model_type": "bert", "architectures": ["BertForMaskedLM"]}')
    with pytest.raises(UserError, match=r"^policy.model .*: bert: .*: take another model$"):
        check_scalar(str(tmp_path / "bert"))


def test_padding_is_a_token_that_no_text_ends_with():
    tokenizer = char_tokenizer()
    assert padding_token(tokenizer, {IDS["a"], IDS["<eos>"]}) == IDS["<pad>"]
    assert padding_token(tokenizer, {IDS["<pad>"], IDS["a"]}) == IDS["<eos>"]
    assert padding_token(tokenizer, {IDS["<pad>"], IDS["<eos>"]}) == IDS["<bos>"]
    bare = SimpleNamespace(pad_token_id=None, eos_token_id=0, all_special_ids=[0])
    assert padding_token(bare, {0, 1}) == 2
