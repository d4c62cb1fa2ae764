"""What a run says about itself before it loads a model."""

import re

import pytest
from transformers import LlamaConfig

from hybrid_grpo.config import RolloutConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.run.sampling import SamplingContext


class Names:
    """A tokenizer whose token 2 is </s>."""

    def convert_ids_to_tokens(self, token: int) -> str:
        return {2: "</s>"}.get(token, f"t{token}")


@pytest.mark.parametrize("settings, line", [
    ({}, "temperature 1, top_p 1, top_k 0, at most 512 tokens, ended by 2 '</s>', 5 't5'"),
    (
        {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.1, "logit_bias": {"3": -100.0}},
        "temperature 0.7, top_p 1, top_k 0, min_p 0.05, repetition_penalty 1.1, logit_bias {'3': -100.0},"
        " at most 512 tokens, ended by 2 '</s>', 5 't5'",
    ),
    (
        {"min_completion_tokens": 4, "stop_strings": ["\n\n"], "logprobs": "sampling", "decoder": "transformers"},
        "temperature 1, top_p 1, top_k 0, min_completion_tokens 4, logprobs sampling, decoder transformers,"
        " at most 512 tokens, ended by 2 '</s>', 5 't5', text '\\n\\n'",
    ),
    (
        {"ignore_eos": True},
        "temperature 1, top_p 1, top_k 0, ignore_eos True, at most 512 tokens, ended by the limit only",
    ),
])  # fmt: skip
def test_the_effective_sampling_is_told(settings, line):
    assert SamplingContext(RolloutConfig(**settings), None, Names(), (2, 5)).fact == line


TOOLS = {"tools": ["calculator"], "max_turns": 3, "max_tool_tokens": 8}


@pytest.mark.parametrize(
    ("settings", "longest"),
    [({}, 30), (TOOLS, 46), ({**TOOLS, "max_total_tokens": 40}, 40), ({"max_total_tokens": 40}, 30)],
)
def test_positions_are_those_of_the_longest_sequence(settings, longest):
    rollout = RolloutConfig(max_completion_tokens=20, **settings)
    SamplingContext(rollout, LlamaConfig(max_position_embeddings=longest), None, ()).check_room(10)
    with pytest.raises(UserError, match=f"is {longest} tokens: limit {re.escape(rollout.lengths)} to {longest - 1}$"):
        SamplingContext(rollout, LlamaConfig(max_position_embeddings=longest - 1), None, ()).check_room(10)
