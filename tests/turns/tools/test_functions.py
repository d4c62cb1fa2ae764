"""A tool with arguments that are the same in every call."""

import pytest
import yaml
from paths import ROOT, SUPPORT

from hybrid_grpo.config import TrainConfig, build
from hybrid_grpo.config.building import dump, to_dict
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.distributed.workers.calls import Call
from hybrid_grpo.turns.tools.functions import ToolEntry

ADD = f"{SUPPORT / 'tools.py'}:add"


def test_fixed_arguments_are_given_and_neither_told_nor_taken_from_the_model():
    tool = ToolEntry(ADD, {"b": 40}).load("rollout.tools[0]")
    told = tool.interface.schema["function"]["function"]["parameters"]
    assert (list(told["properties"]), told["required"]) == (["a"], ["a"])
    replies = [tool.reply(Call({"arguments": [given]}, [0])) for given in ({"a": 2}, {"a": 2, "b": 3}, {})]
    assert replies[0].values == [{"text": "42", "pictures": []}]
    assert [reply.failures[0].message[:24] for reply in replies[1:]] == ["wrong arguments for add:"] * 2


def test_an_argument_that_the_function_does_not_have_is_refused():
    with pytest.raises(UserError, match=r"^rollout\.tools\[1\] .*:add: kwargs c: there is no such argument: known are"):
        ToolEntry(ADD, {"c": 1}).load("rollout.tools[1]")


def test_settings_of_tools_are_written_as_they_are_read_without_secrets():
    tools = ["calculator", {"function": ADD, "kwargs": {"b": 1}}]
    config = build(TrainConfig, {"rollout": {"tools": tools}})
    assert to_dict(config)["rollout"]["tools"] == tools
    assert build(TrainConfig, yaml.safe_load(dump(config))) == config
    secret = build(TrainConfig, {"rollout": {"tools": [{"function": ADD, "kwargs": {"api_key": "x"}}]}})
    with pytest.raises(UserError, match=r"rollout\.tools: kwargs api_key has \*\*\*"):
        build(TrainConfig, yaml.safe_load(dump(secret)))


def test_the_example_finds_the_paragraphs_of_a_folder_by_their_words(tmp_path):
    (tmp_path / "bern.md").write_text("The Aare flows around the old town.\n\nBern has 134,794 people, and bears.")
    (tmp_path / "basel.txt").write_text("The Rhine flows through Basel.\n\nBasel has a fair.")
    search = ToolEntry(f"{ROOT}/examples/search.py:search", {"folder": str(tmp_path), "results": 2}).load("tool")
    assert list(search.signature.parameters) == ["query"]
    assert search.function("Where does the RHINE flow?").startswith("The Rhine flows through Basel.")
    assert search.function("bears people") == "Bern has 134,794 people, and bears."
    assert search.function("zurich") == "nothing found"
