"""Conversations without a model: turns are written here, and what is given between them is what the chat template of
the whole conversation has there."""

import itertools
import json
import queue
import random
import string
import time
from dataclasses import replace

import pytest
import trl_tools
from partner_answers import answer, tokens
from paths import SUPPORT
from tool_tokenizers import FAMILIES, THINKERS, tool_tokenizer
from tools import FORGED
from transformers.utils import get_json_schema

from hybrid_grpo.config import RolloutConfig, ScoringConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.batch import Completion, Rollout
from hybrid_grpo.generation import Journal, Request
from hybrid_grpo.turns.calls import ToolCall
from hybrid_grpo.turns.partners import TurnResponders
from hybrid_grpo.turns.template import TurnTemplate, assistant_message, tool_message, user_message
from hybrid_grpo.turns.tools.tools import Tools
from hybrid_grpo.turns.trajectory import Trajectory

TABLE = {"a": "q", "b": "x", "c": "m", "d": "z"}
NAMES = ("look_up", "add", "slowly", "misbehave")
ROLLOUT = RolloutConfig(
    tools=[f"{SUPPORT / 'tools.py'}:{name}" for name in NAMES], max_turns=6, max_tool_tokens=120, tool_timeout_s=60
)


@pytest.fixture(scope="module")
def tools():
    return Tools(ROLLOUT, ScoringConfig(workers=2))


def partners_of(tools, family, config=ROLLOUT):
    tokenizer = tool_tokenizer(family)
    return tokenizer, TurnResponders([tools], tools, config, tokenizer, {}, (tokenizer.eos_token_id,))


def finished(partners, *keys):
    """The numbers of completions that end now."""
    completions = [partners.finished(key, Completion([], [], "stop")) for key in keys]
    return partners.numbers(Rollout([], completions, 1))


def written(tokenizer, chat, schemas, generation=False):
    return tokenizer.apply_chat_template(
        chat, tools=schemas, tokenize=False, add_generation_prompt=generation, return_dict=False
    )


def spoken(tokenizer, chat, turn, schemas):
    """The tokens of a turn as the template writes it, its end included."""
    before, whole = written(tokenizer, chat, schemas, True), written(tokenizer, [*chat, turn], schemas)
    assert whole.startswith(before)
    text = whole[len(before) :]
    return [*tokens(tokenizer, text[: text.rindex(tokenizer.eos_token)]), tokenizer.eos_token_id]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_is_what_the_template_makes_of_the_whole_conversation(tools, family):
    tokenizer, partners = partners_of(tools, family)
    rng = random.Random(family)

    def word():
        return "".join(rng.choices(string.ascii_letters + " ,.:{}\"'", k=rng.randint(0, 9)))

    for key in range(40):
        chat = [{"role": "user", "content": word()}]
        partners.begin([])
        prompt = tokens(tokenizer, written(tokenizer, chat, tools.schemas, True))
        sampled, given = [], []
        for _ in range(rng.randint(0, 3)):
            calls = [
                rng.choice([ToolCall("add", {"a": rng.randint(0, 99), "b": 2}), ToolCall("look_up", {"key": word()})])
                for _ in range(1 if family == "llama3" else rng.randint(1, 2))
            ]
            turn = assistant_message(word().strip() if family == "hermes" else "", calls)
            ids = spoken(tokenizer, chat, turn, tools.schemas)
            assert partners.ended(key, ids, room=100) is None
            sampled += ids
            given.append((len(sampled), answer(partners, key)))
            chat.append(turn)
            given_to = [call.arguments for call in calls]
            results = [str(of["a"] + 2) if "a" in of else TABLE.get(of["key"], "?") for of in given_to]
            chat += [
                {"role": "tool", "name": c.name, "tool_call_id": f"call{k:05d}", "content": text}
                for k, (c, text) in enumerate(zip(calls, results, strict=True))
            ]
        last = word().strip()
        ids = spoken(tokenizer, chat, {"role": "assistant", "content": last}, tools.schemas)
        assert partners.ended(key, ids, room=50) == "stop"
        sampled += ids
        completion = partners.finished(key, Completion(sampled, [], "stop", last, tuple(given)))
        chat.append({"role": "assistant", "content": last})
        whole = written(tokenizer, chat, tools.schemas)
        assert (
            tokenizer.decode(prompt + completion.read_ids)
            == whole[: whole.rindex(tokenizer.eos_token)] + tokenizer.eos_token
        )
        assert [completion.read_ids[place] for place in completion.sampled_places] == sampled
        assert [*chat[:1], *completion.messages] == chat


@pytest.mark.parametrize("with_tools", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_of_a_user_is_read_as_the_template_writes_it(tools, family, with_tools):
    """That of an environment or an agent. One of the templates writes the tools before every message of the user."""
    tokenizer, schemas = tool_tokenizer(family), tools.schemas if with_tools else None
    between = TurnTemplate(tokenizer, {}, schemas or [], (tokenizer.eos_token_id,))
    chat = [{"role": "user", "content": "begin"}]
    read = tokens(tokenizer, written(tokenizer, chat, schemas, True))
    for said in ("one", "two", "three"):
        read += spoken(tokenizer, chat, assistant_message(said, []), schemas)
        chat += [assistant_message(said, []), user_message(said[::-1])]
        read += between.ids(read[-1], chat[-1:])
    assert tokenizer.decode(read) == written(tokenizer, chat, schemas, True)


BROKEN = {
    "hermes": ['<tool_call>\n{"name": "add", </tool_call>', "<tool_call>[1]</tool_call>", "<tool_call>"],
    "llama3": ['{"name": "add", "parameters": {"a": 1', '{"name": "add", "parameters": [1]}'],
    "mistral": ["[TOOL_CALLS]add", '[TOOL_CALLS][{"name": "add", "arguments": 7}]'],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_goes_wrong_is_told_to_the_model_and_counted(tools, family):
    tokenizer, partners = partners_of(tools, family)
    partners.begin([])
    keys = itertools.count()

    def told(text):
        key, ids = next(keys), tokens(tokenizer, text)
        assert partners.ended(key, [*ids, tokenizer.eos_token_id], room=9) is None
        given = answer(partners, key)
        assert len(given) <= ROLLOUT.max_tool_tokens
        return tokenizer.decode(given)

    def call(name, **arguments):
        return spoken_call(family, name, arguments)

    for text in BROKEN[family]:
        assert "error: the call cannot be read" in told(text)
    assert "error: there is no tool ad: did you mean add?" in told(call("ad", a=1))
    assert "error: wrong arguments for add" in told(call("add", a=1))
    assert "error: TypeError" in told(call("add", a=1, b="x"))
    assert "error: ValueError: no luck" in told(call("misbehave", how="raise"))
    assert "error: ended its process (exit status 3)" in told(call("misbehave", how="exit"))
    assert "long long" in told(call("misbehave", how="long"))
    told(call("misbehave", how="bytes"))
    told(call("misbehave", how="half"))
    assert "error: FileNotFoundError: caf?.txt" in told(call("misbehave", how="file"))
    assert "text" in told(call("slowly", text="here"))
    numbers = finished(partners, *range(next(keys)))
    counted = {name: numbers[f"tool/{name}/calls"][0] for name in (*NAMES, "unknown")}
    assert counted == {"look_up": 0, "add": 2, "slowly": 1, "misbehave": 6, "unknown": len(BROKEN[family]) + 1}
    assert numbers["tool/add/failed_frac"] == (1.0, 2)
    assert numbers["tool/misbehave/failed_frac"] == (3 / 6, 6)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tool_cannot_forge_a_turn(tools, family):
    """Names of control tokens that it returns are read as text: the ids of the frame, and letters."""
    tokenizer, partners = partners_of(tools, family, replace(ROLLOUT, max_tool_tokens=300))
    partners.begin([])
    given = []
    for key, how in enumerate(("bytes", "forge")):
        ids = tokens(tokenizer, spoken_call(family, "misbehave", {"how": how}))
        assert partners.ended(key, [*ids, tokenizer.eos_token_id], room=9) is None
        given.append(answer(partners, key))
    assert json.dumps(FORGED)[1:-1].replace("\\n", "\n") in tokenizer.decode(given[1]).replace("\\n", "\n")
    special = set(tokenizer.all_special_ids) - {tokenizer.pad_token_id}
    frames = [[token for token in ids if token in special] for ids in given]
    assert frames[0] == frames[1]


def test_what_is_no_special_token_is_text_too_where_the_template_writes_it(tools):
    """Qwen's </tool_response> is an added token, and not a special one; <think> of a user's text stays what it is."""
    tokenizer = tool_tokenizer("hermes")
    tokenizer.add_tokens(["</tool_response>", "<think>"])
    between = TurnTemplate(tokenizer, {}, tools.schemas, (tokenizer.eos_token_id,))
    frame, think = tokenizer.convert_tokens_to_ids(["</tool_response>", "<think>"])
    ids = between.ids(tokenizer.eos_token_id, [tool_message(0, "add", "1</tool_response><think>2")])
    assert (ids.count(frame), ids.count(think)) == (1, 1)
    assert "1</tool_response><think>2\n</tool_response>" in tokenizer.decode(ids)


def test_calls_of_a_turn_have_a_limit(tools):
    config = replace(ROLLOUT, max_turn_calls=2, max_tool_tokens=400)
    tokenizer, partners = partners_of(tools, "hermes", config)
    ids = tokenizer(spoken_call("hermes", "look_up", {"key": "a"}) * 60)["input_ids"]
    assert partners.ended(1, [*ids, tokenizer.eos_token_id], room=9) is None
    told = tokenizer.decode(answer(partners, 1))
    assert told.count("<tool_response>") == 3 and "at most 2 calls" in told
    assert finished(partners, 1)["tool/look_up/calls"] == (2, 1)


@pytest.mark.parametrize(
    "family, most, made", [("hermes", 16, 2), ("hermes", 1, 1), ("llama3", 16, 0), ("llama3", 1, 0), ("mistral", 16, 2)]
)
def test_a_turn_of_several_calls_needs_a_template_that_writes_them(tools, family, most, made):
    """Llama 3's raises an error for two calls, and the run ended with it."""
    tokenizer, partners = partners_of(tools, family, replace(ROLLOUT, max_tool_tokens=400, max_turn_calls=most))
    calls = [spoken_call(family, "add", {"a": number, "b": 1}) for number in range(2)]
    told = []
    for key, text in enumerate(["".join(calls), calls[0]]):
        ids = [*tokens(tokenizer, text), tokenizer.eos_token_id]
        assert partners.ended(key, ids, room=9) is None
        told.append(tokenizer.decode(answer(partners, key)))
    assert ["call one tool at a time" in text for text in told] == [not made, False]
    assert [finished(partners, key)["tool/add/calls"][0] for key in range(2)] == [made, 1]


def test_after_a_crash_calls_are_counted_as_in_a_whole_run(tools, tmp_path):
    """Calls of the completions that the journal gave were not in the numbers of the step."""
    tokenizer, partners = partners_of(tools, "hermes")
    texts = [
        spoken_call("hermes", *call) for call in [("add", {"a": 1, "b": "x"}), ("look_up", {"key": "a"}), ("ad", {})]
    ]
    requests, sampled = [Request([1], [0, 1], max_total_tokens=99), Request([2], [2, 3], max_total_tokens=99)], []

    def sample(requests, on_finish):
        partners.begin(requests)
        groups = [[] for _ in requests]
        for index, number, key in [(i, n, key) for i, of in enumerate(requests) for n, key in enumerate(of.keys)]:
            ids = [*tokenizer("".join(texts[: key + 1]))["input_ids"], tokenizer.eos_token_id]
            assert partners.ended(key, ids, room=9) is None
            answer(partners, key)
            sampled.append(key)
            groups[index].append(partners.finished(key, Completion(ids, [0.0] * len(ids), "stop", "", ((1, [2]),))))
            on_finish(index, number, groups[index][-1])
        return groups, None

    def numbers(journal, on_finish=None):
        groups, _ = journal.complete(1, requests, on_finish, sample)
        found = partners.numbers(Rollout([], [c for group in groups for c in group], 2))
        return {name: value for name, value in found.items() if "seconds" not in name and "time" not in name}

    def dies(*_):
        if len(sampled) == 3:
            raise InterruptedError

    whole = numbers(Journal(tmp_path / "whole", 0))
    assert whole["tool/add/calls"] == (4, 1) and whole["tool/add/failed_frac"] == (1.0, 4)
    assert whole["tool/look_up/calls"] == (3, 1) and whole["tool/unknown/failed_frac"] == (1.0, 2)
    sampled.clear()
    with pytest.raises(InterruptedError):
        numbers(Journal(tmp_path / "killed", 0), dies)
    assert numbers(Journal(tmp_path / "killed", 0)) == whole and sampled == [0, 1, 2, 3]


def spoken_call(family, name, arguments):
    if family == "hermes":
        return f"I ask<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
    if family == "llama3":
        return json.dumps({"name": name, "parameters": arguments})
    return f"[TOOL_CALLS]{json.dumps([{'name': name, 'arguments': arguments}])}"


@pytest.mark.process
def test_a_tool_that_takes_too_long_is_told_and_ended():
    config = RolloutConfig(tools=ROLLOUT.tools[3:], tool_timeout_s=0.5)
    tools = Tools(config, ScoringConfig(workers=1))
    tokenizer, partners = partners_of(tools, "hermes", config)
    ids = tokenizer(spoken_call("hermes", "misbehave", {"how": "hang"}))["input_ids"]
    assert partners.ended(1, [*ids, tokenizer.eos_token_id], room=9) is None
    assert "error: took longer than" in tokenizer.decode(answer(partners, 1))
    # Of 60 that hang, the first eight begin: the others would have taken half a minute with one process.
    config = replace(config, max_turn_calls=60, max_tool_tokens=8000)
    tokenizer, partners = partners_of(tools, "hermes", config)
    start_s = time.monotonic()
    assert partners.ended(2, [*(ids * 60), tokenizer.eos_token_id], room=9) is None
    told = tokenizer.decode(answer(partners, 2))
    assert time.monotonic() - start_s < 25
    assert (told.count("error: took longer"), told.count("error: not called")) == (8, 52)
    assert finished(partners, 2)["tool/misbehave/calls"] == (60, 1)


def test_turns_and_room_have_a_limit(tools):
    tokenizer, partners = partners_of(tools, "hermes", RolloutConfig(tools=ROLLOUT.tools, max_turns=2))
    ids = tokenizer(spoken_call("hermes", "look_up", {"key": "a"}))["input_ids"] + [tokenizer.eos_token_id]
    assert partners.ended(1, ids, room=0) == "length"
    assert partners.ended(2, ids, room=5) is None
    assert "q" in tokenizer.decode(answer(partners, 2))
    assert partners.ended(2, ids, room=5) == "length"


def test_answers_of_a_rollout_that_was_given_up_are_dropped(tools):
    tokenizer, partners = partners_of(tools, "hermes")
    ids = tokenizer(spoken_call("hermes", "look_up", {"key": "a"}))["input_ids"] + [tokenizer.eos_token_id]
    assert partners.ended(1, ids, room=5) is None
    partners.begin([])
    other = tokenizer(spoken_call("hermes", "look_up", {"key": "b"}))["input_ids"] + [tokenizer.eos_token_id]
    assert partners.ended(1, other, room=5) is None
    assert "x" in tokenizer.decode(answer(partners, 1)).replace("<tool", "")
    assert partners.answers(0.0) == []


@pytest.mark.parametrize("template, message", [
    ("{% for m in messages %}{{ m.content }}{% endfor %}", "leaves out a call|does not end a turn"),
    ("{{ raise_exception('no tools') }}", "refuses a call of a tool and its result: no tools"),
    (FAMILIES["hermes"][0].replace("{{ message.content }}\n</tool_response>", "</tool_response>"), "leaves out"),
])  # fmt: skip
def test_a_template_without_tools_is_refused(tools, template, message):
    tokenizer = tool_tokenizer("hermes")
    tokenizer.chat_template = template
    config = RolloutConfig(tools=ROLLOUT.tools, tool_format="hermes")
    with pytest.raises(UserError, match=rf"rollout\.tools: the chat template of policy\.model .*({message})"):
        TurnResponders([tools], tools, config, tokenizer, {}, (tokenizer.eos_token_id,))


LOOKED_UP = tool_message(0, "look_up", "q")
KEPT = [
    ("since the user spoke", {}, LOOKED_UP, None),
    ("since the user spoke", {}, user_message("."), "drops the thinking of earlier turns"),
    ("since the user spoke", {"enable_thinking": False}, LOOKED_UP, "writes earlier turns anew"),
    ("never", {}, LOOKED_UP, "drops the thinking of earlier turns"), ("always", {}, user_message("."), None),
    ("in a place of its own", {}, LOOKED_UP, None), ("in a place of its own", {}, user_message("."), None),
]  # fmt: skip


@pytest.mark.parametrize(("keeps", "variables", "message", "why"), KEPT)
def test_a_template_that_does_not_keep_what_the_model_wrote_is_refused(tools, keeps, variables, message, why):
    tokenizer = tool_tokenizer("hermes")
    tokenizer.chat_template = THINKERS[keeps]
    between = TurnTemplate(tokenizer, variables, tools.schemas, (tokenizer.eos_token_id,))

    def example(content):
        return {**message, "content": content}

    between.check("rollout.x", example)
    if why is None:
        between.check_history("rollout.x", example)
    else:
        with pytest.raises(UserError, match=rf"rollout\.x: the chat template .* {why}.*rollout\.keep_history true"):
            between.check_history("rollout.x", example)


def test_keep_history_reads_what_the_model_wrote(tools):
    tokenizer = tool_tokenizer("hermes")
    tokenizer.chat_template = THINKERS["never"]
    ends = (tokenizer.eos_token_id,)
    with pytest.raises(UserError, match=r"rollout\.tools: .* drops the thinking"):
        TurnResponders([tools], tools, ROLLOUT, tokenizer, {}, ends)
    partners = TurnResponders([tools], tools, replace(ROLLOUT, keep_history=True), tokenizer, {}, ends)
    partners.begin([])
    ids = tokenizer(f"<think>\nhm\n</think>\n\n{spoken_call('hermes', 'look_up', {'key': 'a'})}")["input_ids"]
    assert partners.ended(1, [*ids, *ends], room=9) is None
    given = tokenizer.decode(answer(partners, 1))
    assert given == "\n<|im_start|>user\n<tool_response>\nq\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


READY_MADE = [
    ("calculator", {"expression": "(3 + 4.5) * -2"}, "-15"), ("calculator", {"expression": "1 / 3"}, "0.333333333333"),
    ("calculator", {"expression": "10 ** 9 ** 9"}, "error: ValueError: not an expression of numbers"),
    ("calculator", {"expression": "1 / 0"}, "error: ZeroDivisionError"),
    ("calculator", {"expression": "__import__('os')"}, "error: ValueError: not an expression"),
    ("python", {"code": "print(sum(range(10)))"}, "45"),
    ("python", {"code": "print(1)\nraise KeyError('a')"}, "1\n\nKeyError: 'a'"),
    ("python", {"code": "open('/etc/passwd')"}, "PermissionError"), ("multiply", {"a": 6, "b": 7}, "42"),
    ("async_add", {"a": 6, "b": 7}, "13"),
    ("count", {"item": "chair"}, '{"item": "chair", "count": 3, "colours": "all"}'),
    ("count", {"item": "chair", "colours": ["red"]}, '{"item": "chair", "count": 3, "colours": ["red"]}'),
    ("count", {"item": "sofa"}, "error: KeyError: 'sofa'"),
]  # fmt: skip


@pytest.fixture(scope="module")
def ready_made():
    of_trl = [f"{SUPPORT / 'trl_tools.py'}:{name}" for name in ("multiply", "async_add", "count")]
    return Tools(RolloutConfig(tools=["calculator", "python", *of_trl]), ScoringConfig(workers=1))


@pytest.mark.parametrize(("name", "arguments", "result"), READY_MADE)
def test_the_tools_that_are_there_already_and_those_written_for_trl(ready_made, name, arguments, result):
    told = queue.SimpleQueue()
    ready_made.call(Trajectory(1), ToolCall(name, arguments), lambda text, _: told.put(text))
    assert told.get(timeout=60).text.strip().startswith(result)


def test_tools_written_for_trl_are_described_as_trl_does(ready_made):
    functions = (trl_tools.multiply, trl_tools.async_add, trl_tools.count)
    assert ready_made.schemas[-3:] == [get_json_schema(function) for function in functions]


@pytest.mark.parametrize(
    ("name", "message"),
    [("undescribed", "cannot be described to the model.*type hint"), ("nothing", "has no function nothing")],
)
def test_a_function_that_is_no_tool_is_refused(name, message):
    config = RolloutConfig(tools=[f"{SUPPORT / 'tools.py'}:{name}"])
    with pytest.raises(UserError, match=rf"rollout\.tools\[0\] .*{message}"):
        Tools(config, ScoringConfig(workers=1))


def test_the_time_that_decoding_waits_is_counted_once():
    tokenizer = tool_tokenizer(next(iter(FAMILIES)))
    partners = TurnResponders([], None, ROLLOUT, tokenizer, {}, (tokenizer.eos_token_id,))
    nothing = Rollout([], [], 1)
    assert partners.answers(0.0) == [] and partners.numbers(nothing)["time/tool_wait_s"] == (0.0, 1)
    start = time.perf_counter()
    assert partners.answers(0.1) == partners.answers(0.1) == []
    waited, count = partners.numbers(nothing)["time/tool_wait_s"]
    assert 0.19 <= waited <= time.perf_counter() - start and count == 1
    assert partners.numbers(nothing)["time/tool_wait_s"] == (0.0, 1)
