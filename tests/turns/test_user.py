"""Users without a policy: the turns of the model are written here."""

import re

import pytest
from partner_answers import answers, tokens
from paths import SUPPORT
from tool_tokenizers import FAMILIES, tool_tokenizer

from hybrid_grpo.config import RolloutConfig, ScoringConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.batch import Completion, Prompt, Rollout
from hybrid_grpo.generation import Request
from hybrid_grpo.turns.partners import TurnResponders
from hybrid_grpo.turns.template import assistant_message, user_message
from hybrid_grpo.turns.trajectory import Answer
from hybrid_grpo.turns.user import User, UserEntry

PLAYED = SUPPORT / "played_users.py"
SCORING = ScoringConfig(workers=2)


def played(name, **settings):
    return RolloutConfig(**{"user": f"{PLAYED}:{name}", "max_turns": 6, "max_tool_tokens": 80, **settings})


def began(config, user, family, *rows, **more):
    """Conversations of rows, by the keys 0, 1, ..., whose prompts are their columns' `asked`."""
    tokenizer = tool_tokenizer(family)
    ends = (tokenizer.eos_token_id,)
    partners = TurnResponders([user], None, config, tokenizer, {}, ends, user=user, **more)
    prompts = [Prompt(key, [user_message(columns["asked"])], [1], columns) for key, columns in enumerate(rows)]
    partners.begin([Request([1], [key], prompt=prompt) for key, prompt in enumerate(prompts)])
    return tokenizer, partners


@pytest.fixture(scope="module")
def reader():
    return User(played("reads_out"), SCORING)


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
    user = User(config, SCORING)
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


def test_columns_that_are_missing_are_named(reader):
    with pytest.raises(UserError, match=r"rollout\.user .*needs a column words.*did you mean word\?"):
        reader.check_columns({"word": 1})
