"""Users without a policy: the turns of the model are written here."""

import re

import pytest
import torch
from cuda_graphs import Captures
from partner_answers import answers, tokens
from paths import SUPPORT
from tiny_models import build, tiny_config
from tool_tokenizers import FAMILIES, tool_tokenizer

from hybrid_grpo.config import PolicyConfig, RolloutConfig, ScoringConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.batch import Completion, Prompt, Rollout
from hybrid_grpo.generation import Request, loop
from hybrid_grpo.model.loading import load_tokenizer
from hybrid_grpo.turns.partners import Partners
from hybrid_grpo.turns.template import assistant_message, user_message
from hybrid_grpo.turns.trajectory import Answer
from hybrid_grpo.turns.users.functions import UserEntry
from hybrid_grpo.turns.users.users import ModelUser, ScriptedUser, exchanged

PLAYED = SUPPORT / "played_users.py"
SCORING = ScoringConfig(workers=2)


def played(name, **settings):
    return RolloutConfig(**{"user": f"{PLAYED}:{name}", "max_turns": 6, "max_tool_tokens": 80, **settings})


def began(config, user, family, *rows, **more):
    """Conversations of rows, by the keys 0, 1, ..., whose prompts are their columns' `asked`."""
    tokenizer = tool_tokenizer(family)
    ends = (tokenizer.eos_token_id,)
    partners = Partners([user], None, config, tokenizer, {}, ends, user=user, **more)
    prompts = [Prompt(key, [user_message(columns["asked"])], [1], columns) for key, columns in enumerate(rows)]
    partners.begin([Request([1], [key], prompt=prompt) for key, prompt in enumerate(prompts)])
    return tokenizer, partners


@pytest.fixture(scope="module")
def reader():
    return ScriptedUser(played("reads_out"), SCORING)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_scripted_dialogue_has_the_tokens_of_the_template(reader, family):
    tokenizer, partners = began(played("reads_out"), reader, family, {"asked": "begin", "words": ["Bern", "Basel"]})

    def written(generation):
        return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation)

    chat = [user_message("begin")]
    read, given = tokens(tokenizer, written(True)), []
    for said, heard in (("yes", "1: Bern after yes"), ("no", "2: Basel after no")):
        turn = [*tokens(tokenizer, said), tokenizer.eos_token_id]
        assert partners.ended(0, turn, room=50) is None
        given.append((len(given), answers(partners, 1)[0]))
        read += turn + given[-1][1]
        chat += [assistant_message(said, []), user_message(heard)]
        assert tokenizer.decode(read) == written(True)
    assert partners.ended(0, [*tokens(tokenizer, "bye"), tokenizer.eos_token_id], room=50) is None
    assert answers(partners, 1) == {0: "stop"}
    completion = partners.finished(0, Completion([], [], "stop", "bye", tuple(given)))
    assert [chat[0], *completion.messages] == [*chat, assistant_message("bye", [])]


def numbers_of(partners, count):
    completions = [partners.finished(key, Completion([], [], "stop")) for key in range(count)]
    return partners.numbers(Rollout([], completions, 1))


ENDS = ["raise", "exit", "number", "hang", "nothing", "empty", "stop"]
FAILED = 4


@pytest.mark.process
def test_a_user_that_fails_or_has_enough_ends_its_conversation_alone(capfd):
    config = played("behaves", tool_timeout_s=2, user_stop=["BYE"])
    user = ScriptedUser(config, SCORING)
    rows = [{"asked": "?", "how": how} for how in [*ENDS, "hello", "long"]]
    tokenizer, partners = began(config, user, "hermes", *rows)
    turn = [*tokens(tokenizer, "well"), tokenizer.eos_token_id]
    assert {partners.ended(key, turn, room=9) for key in range(len(rows))} == {None}
    found = answers(partners, len(rows))
    assert [found[key] for key in range(len(ENDS))] == ["stop"] * len(ENDS)
    assert "hello" in tokenizer.decode(found[len(ENDS)])
    assert len(found[len(ENDS) + 1]) <= config.max_tool_tokens and "long long" in tokenizer.decode(found[len(ENDS) + 1])
    numbers = numbers_of(partners, len(rows))
    assert numbers["user/calls"] == (len(rows), 1)
    assert numbers["user/failed_frac"] == (FAILED / len(rows), len(rows))
    told = capfd.readouterr().err
    assert told.count("rollout.user failed: ") == FAILED and "ValueError: no luck" in told


class Episodes:
    """The environments of conversations, which have methods alone."""

    ended = ()

    def begin(self, prompts):
        pass

    def give_up(self):
        pass

    def has_failed(self, trajectory):
        return False

    def end(self, trajectory, finish, done):
        self.ended += (finish,)
        done(Answer(finish=finish))


def test_an_environment_ends_with_the_conversation_that_the_user_ends(reader):
    episodes = Episodes()
    row = {"asked": "a", "words": ["b"]}
    tokenizer, partners = began(played("reads_out"), reader, "hermes", row, environments=episodes)
    turn = [*tokens(tokenizer, "c"), tokenizer.eos_token_id]
    for found, ended in ((list, ()), (str, ("stop",))):
        assert partners.ended(0, turn, room=50) is None
        assert isinstance(answers(partners, 1)[0], found) and episodes.ended == ended


def test_without_room_for_another_turn_the_conversation_is_cut(reader):
    """It was said to have ended by itself, where the page promises `length`; after the last turn it has."""
    for turns, finish in ((6, "length"), (1, "stop")):
        config = played("reads_out", max_turns=turns)
        tokenizer, partners = began(config, reader, "hermes", {"asked": "a", "words": ["b"] * 9})
        assert partners.ended(0, [*tokens(tokenizer, "c"), tokenizer.eos_token_id], room=0) == finish


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (f"{PLAYED}:forgets", "has no argument messages"),
        (f"{PLAYED}:behave", "has no function behave: did you mean behaves"),
        ("behaves", r"give path/to/file\.py:name"),
    ],
)
def test_a_function_that_is_no_user_is_refused(function, message):
    with pytest.raises(UserError, match=rf"^rollout\.user {re.escape(function)}.*{message}"):
        UserEntry(function).load("rollout.user")


def test_columns_that_are_missing_are_named(reader, model_folder):
    with pytest.raises(UserError, match=r"rollout\.user .*needs a column words.*did you mean word\?"):
        reader.check_columns({"word": 1})
    with pytest.raises(UserError, match=r"rollout\.user_prompt names a column goal.*did you mean goals\?"):
        model_user(model_folder).check_columns({"goals": 1})


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("user"), tool_tokenizer("hermes")
    config = tiny_config("qwen2", vocab_size=len(tokenizer), max_position_embeddings=160)
    config.eos_token_id = tokenizer.eos_token_id
    build(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def model_config(folder, **settings):
    told = "You want {goal}. {unknown} stays"
    return RolloutConfig(user_model=str(folder), user_prompt=told, max_tool_tokens=32, **settings)


def model_user(folder, **settings):
    return ModelUser(model_config(folder, **settings), PolicyConfig(dtype="float32"))


ROWS = [{"asked": "a" * n, "goal": "tea" * n} for n in range(1, 6)]


def spoken_by(folder, together, **settings):
    """What the model says in two turns of each conversation, asked together or one after the other."""
    user = model_user(folder, **settings)
    user.load(torch.device("cpu"), 150)
    tokenizer, partners = began(model_config(folder, **settings), user, "llama3", *ROWS)
    turn = [*tokens(tokenizer, "what?"), tokenizer.eos_token_id]
    said = []
    for _ in range(2):
        found = {}
        for keys in [range(5)] if together else [[4], [1, 2], [0, 3]]:
            for key in keys:
                assert partners.ended(key, turn, room=50) is None
            found |= answers(partners, len(keys))
        said.append([found[key] for key in range(5)])
    return said


def test_what_a_model_says_does_not_depend_on_who_waits_beside_it(model_folder):
    together = spoken_by(model_folder, True)
    assert together == spoken_by(model_folder, False)
    assert together == spoken_by(model_folder, True, max_slots=2)
    texts = [str(ids) for turn in together for ids in turn]
    assert len(set(texts)) == len(texts)
    assert together != spoken_by(model_folder, True, user_temperature=0.5)


@pytest.mark.usefixtures("torch_only")
def test_a_model_captures_its_graphs_the_first_time_it_speaks(model_folder, monkeypatch):
    """It captured some of them in every turn, and its cache was made of what the policy's had left."""
    captures, counts = Captures(), []
    monkeypatch.setattr(loop, "capture_on", lambda _: captures)
    speak = ModelUser.speak
    monkeypatch.setattr(ModelUser, "speak", lambda *given: (speak(*given), counts.append(len(captures.graphs))))
    spoken_by(model_folder, False)
    assert len(counts) >= 6 and set(counts) == {counts[0]} and counts[0] > 1


def test_a_model_reads_the_conversation_from_the_other_side(model_folder, monkeypatch):
    asked = []

    def complete(model, tokenizer, requests, *_, workspace):
        asked.extend(request.prompt_ids for request in requests)
        return [[Completion([1], [0.0], "stop", " tea! ")] for _ in requests], None

    monkeypatch.setattr("hybrid_grpo.turns.users.users.complete", complete)
    user = model_user(model_folder)
    user.load(torch.device("cpu"), 150)
    tokenizer, partners = began(model_config(model_folder), user, "llama3", *ROWS[:1])
    for said in ("what?", "milk?"):
        assert partners.ended(0, [*tokens(tokenizer, said), tokenizer.eos_token_id], room=50) is None
        assert "\n\ntea!<" in tokenizer.decode(answers(partners, 1)[0])
    chat = [
        {"role": "system", "content": "You want tea. {unknown} stays"},
        assistant_message("a", []),
        user_message("what?"),
        assistant_message("tea!", []),
        user_message("milk?"),
    ]
    theirs = load_tokenizer(str(model_folder))
    assert asked[1] == tokens(theirs, theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    numbers = numbers_of(partners, 1)
    assert (numbers["user/calls"], numbers["user/failed_frac"]) == ((2, 1), (0.0, 2))


def test_calls_of_tools_and_the_system_text_are_not_the_user_s_to_read():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    given = [{"role": "system", "content": "x"}, user_message("a"), call, {"role": "tool", "content": "3"}]
    assert exchanged([*given, assistant_message("b", [])]) == [assistant_message("a", []), user_message("b")]


@pytest.mark.parametrize("asked, fails", [(30, 0.0), (90, 1.0), (200, 1.0)])
def test_a_conversation_that_is_too_long_for_the_model_is_counted_as_a_failure(model_folder, asked, fails):
    user = model_user(model_folder)
    user.load(torch.device("cpu"), 150)
    _, partners = began(model_config(model_folder), user, "llama3", {"asked": "a" * asked, "goal": "tea"})
    assert partners.ended(0, [3, 6], room=50) is None
    assert (answers(partners, 1) == {0: "stop"}) is bool(fails)
    assert numbers_of(partners, 1)["user/failed_frac"] == (fails, 1)


@pytest.mark.parametrize(
    ("template", "message"),
    [(None, "has no chat template"), ("{{ raise_exception('users first') }}", "refuses a system text .* users first")],
)
def test_a_model_that_cannot_be_told_whom_it_plays_is_refused(model_folder, tmp_path, template, message):
    for file in model_folder.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match=rf"rollout\.user_model .*{message}"):
        model_user(tmp_path)
