"""Compares the model inside the engine with transformers' own: the same weights must give the same log-probabilities.

It sees what loading, sharding or the attention of training did to the weights and buffers. It cannot see what is wrong
in the files themselves, since both models read them; for this, the line that is printed says how well the model
predicts a sentence.
"""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from hybrid_grpo.config.errors import refuse
from hybrid_grpo.distributed.ranks import from_first_rank, rank
from hybrid_grpo.model.eight_bits import pack_tables
from hybrid_grpo.model.gathered_weights import whole_shape
from hybrid_grpo.model.gguf import files_of
from hybrid_grpo.model.loading import add_adapter, dequantizing, in_four_bits, load_config
from hybrid_grpo.model.sidecars import TokenRow
from hybrid_grpo.model.towers import has_tower
from hybrid_grpo.policy import Policy

_SENTENCE = "the quick brown fox jumps over the lazy dog"
_TOKENS = 16
_LARGEST = 1_500_000_000
"""Parameters above which `policy.verify: auto` compares nothing: rank 0 would read the model for minutes."""
_BOUNDS = {"float32": 1e-3, "bfloat16": 1.0}
"""Largest gap in nats that rounding explains, by the dtype of the weights: at most 3e-5 and 0.4 were measured with 24
random layers, and several nats with a wrong one (docs/log.md)."""


@torch.no_grad()
def verified(policy: Policy) -> str:
    """Return a line that says how far the policy, as it was loaded, is from transformers' own model on 16 tokens. Raise
    UserError if rounding does not explain it, or if the model gives every token the same probability. Collective."""
    config, module = policy.config, policy.engine.engine.module
    start = f"policy.model {config.model}"
    size = sum(whole_shape(parameter).numel() for parameter in module.parameters())
    if config.verify == "off" or (config.verify == "auto" and size > _LARGEST):
        why = "policy.verify off" if config.verify == "off" else f"{size / 1e9:.1f}B parameters; policy.verify on does"
        return f"not compared with transformers' own model ({why})"
    ids = _ids(policy)
    batches = policy.micro_batches(TokenRow.of([ids[:1]], [ids[1:]]), gradients=False)
    logp_T = policy.logprobs(batches, (1, len(ids) - 1), temperature=1.0)[0].cpu()
    refuse(
        float(logp_T.max() - logp_T.min()) == 0.0,
        f"{start} gives every token the same probability: its last norm or its output head is 0: use an intact copy",
    )
    own_T = from_first_rank(_of_transformers(policy, ids) if rank() == 0 else torch.empty(0))
    gap, bound = float((logp_T - own_T).abs().max()), _BOUNDS[config.dtype]
    refuse(
        not gap <= bound,
        f"{start}: in the engine, log-probabilities differ by up to {gap:.3g} nats from those of transformers' own"
        f" model ({bound:g} in {config.dtype} may be rounding), so that another model would be trained: try"
        " policy.attn_implementation eager or a lower engine.zero_stage, or set policy.verify to off",
    )
    return (
        f"as in transformers' own model (at most {gap:.1g} nats apart); a sentence takes {-float(logp_T.mean()):.2f}"
        f" nats per token, and guessing {math.log(policy.vocabulary):.2f}"
    )


def _ids(policy: Policy) -> list[int]:
    """Return the tokens of a sentence, or tokens across the vocabulary if the tokenizer knows too little of it."""
    size = policy.vocabulary
    ids = [token for token in policy.tokenizer(_SENTENCE)["input_ids"] if token < size][:_TOKENS]
    return ids if len(set(ids)) >= _TOKENS // 2 else [number * size // _TOKENS for number in range(_TOKENS)]


def _of_transformers(policy: Policy, ids: list[int]) -> Tensor:
    """Return the log-probabilities [T] of all tokens but the first, computed outside the engine, on the CPU."""
    config, model_config = policy.config, load_config(policy.config.model)
    dtype, packed = getattr(torch, config.dtype), policy.packed
    auto: Any = AutoModelForImageTextToText if has_tower(model_config) else AutoModelForCausalLM
    model = auto.from_pretrained(
        files_of(config.model), dtype=dtype, attn_implementation="eager", trust_remote_code=False,
        **(in_four_bits(dtype) | {"device_map": "cpu"} if packed else dequantizing(model_config)),
    )  # fmt: skip
    if packed:
        pack_tables(model := model.dequantize())
    add_adapter(model, config.model)
    logits_TV = model.eval()(torch.tensor([ids]), use_cache=False).logits[0, :-1, : policy.vocabulary].float()
    return logits_TV.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1)
