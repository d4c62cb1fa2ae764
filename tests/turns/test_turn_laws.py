"""What holds of turns whoever answers them: how long answers are and where a turn ends."""

from typing import Any

import pytest
from partner_answers import answer, tokens
from tool_tokenizers import FAMILIES, tool_tokenizer

from hybrid_grpo.config import RolloutConfig
from hybrid_grpo.data.batch import Completion, Prompt
from hybrid_grpo.generation import Request
from hybrid_grpo.turns.partners import TurnResponders
from hybrid_grpo.turns.template import user_message
from hybrid_grpo.turns.trajectory import Answer, Seconds

GO = [{"role": "user", "content": "Go."}]


class Says:
    """Answers every turn with the same texts, at once; with `ends` it is an environment as well."""

    setting, reads_last, shows, seconds = "rollout.somebody", False, False, Seconds()

    def __init__(self, *texts: str) -> None:
        self._texts, self.ended = texts, list[str]()

    def example(self, content: str) -> dict[str, Any]:
        return user_message(content)

    def begin(self, prompts: Any) -> None:
        pass

    def takes(self, *_: Any) -> bool:
        return True

    def answer(self, trajectory: Any, turn: Any, done: Any) -> None:
        done(Answer([user_message(text) for text in self._texts]))

    def end(self, trajectory: Any, finish: str, done: Any) -> None:
        self.ended.append(finish)
        done(Answer(finish=finish))  # type: ignore[arg-type]

    def has_failed(self, trajectory: Any) -> bool:
        return False

    def episode(self, key: int) -> None:
        return None

    def give_up(self) -> None:
        """Nothing to leave."""

    def numbers(self, rollout: Any) -> dict[str, Any]:
        return {}


def begun(says: Says, most: int | None = None, environments: Any = None, **rollout: Any) -> tuple[Any, TurnResponders]:
    """A conversation, with key 1, of a prompt of ten tokens."""
    tokenizer, config = tool_tokenizer("hermes"), RolloutConfig(**{"max_turns": 9, **rollout})
    partners = TurnResponders([says], None, config, tokenizer, {}, (tokenizer.eos_token_id,), environments)
    partners.begin([Request([5] * 10, [1], max_total_tokens=most, prompt=Prompt(0, GO, [5] * 10, {}))])
    return tokenizer, partners


@pytest.mark.parametrize("limit", [40, 97])
@pytest.mark.parametrize("texts", [("a b " * 200,), ("a b " * 200, "c d " * 200), ("a b " * 200,) * 3])
def test_all_that_answers_a_turn_has_at_most_max_tool_tokens_and_no_fewer_than_fit(texts, limit):
    """The words of the template around it are counted too; each message has an equal share."""
    tokenizer, partners = begun(Says(*texts), max_tool_tokens=limit)
    assert partners.ended(1, [*tokens(tokenizer, "x"), tokenizer.eos_token_id], room=500) is None
    given = answer(partners)
    # Shares are whole tokens, and the cut text may end in the middle of what was a longer token.
    assert limit - 2 * len(texts) <= len(given) <= limit
    shares = [len(tokens(tokenizer, m["content"])) for m in partners.finished(1, ended(given)).messages[1:-1]]
    assert len(shares) == len(texts) and max(shares) - min(shares) <= 1


def ended(*read: list[int]) -> Completion:
    """A completion that has read these answers."""
    return Completion([], [], "stop", "", tuple((0, ids) for ids in read))


def test_an_answer_that_leaves_no_room_for_a_token_ends_the_completion_and_its_environment():
    """One that leaves room for a single token is read. The second turn counts what was read and sampled before."""
    tokenizer, partners = begun(Says("so"))
    turn = [*tokens(tokenizer, "x"), tokenizer.eos_token_id]
    partners.ended(1, turn, room=500)
    length = len(answer(partners))
    for turns in (1, 2):
        filled = 10 + turns * (len(turn) + length)
        for most, fits in ((filled + 1, True), (filled, False)):
            says = Says("so")
            _, partners = begun(says, most, environments=says)
            found = []
            for _ in range(turns):
                assert partners.ended(1, turn, room=500) is None
                found.append(answer(partners))
            assert all(len(read) == length for read in found[: turns - 1])
            assert (found[-1] == "length") != fits and says.ended == ([] if fits else ["length"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_that_no_token_ends_keeps_its_last_and_is_ended_by_the_template(family):
    """A stop string ends a turn without the model's token; what is read after it begins with that token."""
    tokenizer = tool_tokenizer(family)
    end, said = tokenizer.eos_token_id, Says("so")
    partners = TurnResponders([said], None, RolloutConfig(max_turns=9), tokenizer, {}, (end,))
    read, heard = [], []
    for last in ([end], []):
        partners.begin([Request([5], [1], prompt=Prompt(0, GO, [5], {}))])
        assert partners.ended(1, [*tokens(tokenizer, "one two"), *last], room=500) is None
        given = answer(partners)
        read.append([*last, *given])
        heard.append(partners.finished(1, ended(given)).messages[0]["content"])
    assert heard == ["one two"] * 2 and read[0] == read[1]
