"""What an environment says at the end of a prompt, without an environment."""

from types import SimpleNamespace

import pytest
from tool_tokenizers import FAMILIES, tool_tokenizer

from hybrid_grpo.config import DataConfig
from hybrid_grpo.data.batch import Prompt
from hybrid_grpo.data.episodes import Observation, Opening
from hybrid_grpo.turns.openings import Openings, _extended

TEXT = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Go. "}]
TOOL = {"type": "function", "function": {"name": "jump", "description": "Up.", "parameters": {}}}


def opened(observation, kinds=1, tools=(), tokens=100):
    tokenizer, said = tool_tokenizer(next(iter(FAMILIES))), None if observation is None else Observation(observation)
    environments = SimpleNamespace(
        kinds=dict.fromkeys(range(kinds)),
        kind=lambda prompt: prompt.id,
        openings=lambda prompts, seeds: [Opening(seed, p.text, said) for p, seed in zip(prompts, seeds, strict=True)],
    )
    schemas = SimpleNamespace(schemas_of=lambda kind: list(tools) if kind == 5 else [])
    openings = Openings(environments, schemas if tools else None, DataConfig(), tokenizer, tokens)
    [prompt] = openings.opened([Prompt(5, TEXT, [1], {"a": 3})], [77])
    assert prompt.opening.seed == 77 and prompt.opening.text == TEXT and prompt.columns == {"a": 3}
    return tokenizer, prompt


def test_a_prompt_to_which_its_only_environment_says_nothing_stays_as_it_was():
    _, prompt = opened(None)
    assert (prompt.text, prompt.token_ids) == (TEXT, [1])


@pytest.mark.parametrize(("observation", "kinds", "tools"), [
    ("You see a door.", 1, ()),
    ("", 1, ()),
    (None, 2, (TOOL,)),
    ("You see a door.", 2, (TOOL,)),
])  # fmt: skip
def test_tokens_are_those_of_the_template_with_what_is_said_and_the_tools_of_its_environment(observation, kinds, tools):
    tokenizer, prompt = opened(observation, kinds, tools)
    said = [TEXT[0], {"role": "user", "content": "Go. " + (observation or "")}]
    assert prompt.text == said and TEXT[1]["content"] == "Go. "
    whole = tokenizer.apply_chat_template(said, tools=list(tools) or None, tokenize=False, add_generation_prompt=True)
    assert prompt.token_ids == tokenizer(whole, add_special_tokens=False)["input_ids"]


def test_what_is_said_is_cut():
    tokenizer, prompt = opened("abc " * 50, tokens=7)
    more = prompt.text[-1]["content"].removeprefix("Go. ")
    assert more and ("abc " * 50).startswith(more) and len(tokenizer(more, add_special_tokens=False)["input_ids"]) <= 7


def test_more_goes_to_the_end_of_the_last_message():
    assert _extended("a", "b") == "ab"
    assert _extended(TEXT, "b") == [TEXT[0], {"role": "user", "content": "Go. b"}]
    part = {"type": "text", "text": "a"}
    assert _extended([{"role": "user", "content": [part]}], "b")[0]["content"] == [part, {"type": "text", "text": "b"}]
