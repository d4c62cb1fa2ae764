"""What holds of turns whoever answers them: how long answers are, where a turn ends, and what a lost environment is."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from paths import SUPPORT
from tool_tokenizers import FAMILIES, tool_tokenizer

from hybrid_grpo.config import RolloutConfig, TrainConfig, build
from hybrid_grpo.data.batch import Completion, Prompt
from hybrid_grpo.generation import Request
from hybrid_grpo.turns.partners import Partners, partners_of
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


def begun(says: Says, most: int | None = None, environments: Any = None, **rollout: Any) -> tuple[Any, Partners]:
    """A conversation, with key 1, of a prompt of ten tokens."""
    tokenizer, config = tool_tokenizer("hermes"), RolloutConfig(**{"max_turns": 9, **rollout})
    partners = Partners([says], None, config, tokenizer, {}, (tokenizer.eos_token_id,), environments)
    partners.begin([Request([5] * 10, [1], max_total_tokens=most, prompt=Prompt(0, GO, [5] * 10, {}))])
    return tokenizer, partners


def tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def answered(partners: Partners) -> Any:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if found := partners.answers(0.2):
            [(_, said)] = found
            return said
    raise AssertionError("no answer")


@pytest.mark.parametrize("limit", [40, 97])
@pytest.mark.parametrize("texts", [("a b " * 200,), ("a b " * 200, "c d " * 200), ("a b " * 200,) * 3])
def test_all_that_answers_a_turn_has_at_most_max_tool_tokens_and_no_fewer_than_fit(texts, limit):
    """The words of the template around it are counted too; each message has an equal share."""
    tokenizer, partners = begun(Says(*texts), max_tool_tokens=limit)
    assert partners.ended(1, [*tokens(tokenizer, "x"), tokenizer.eos_token_id], room=500) is None
    given = answered(partners)
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
    length = len(answered(partners))
    for turns in (1, 2):
        filled = 10 + turns * (len(turn) + length)
        for most, fits in ((filled + 1, True), (filled, False)):
            says = Says("so")
            _, partners = begun(says, most, environments=says)
            found = []
            for _ in range(turns):
                assert partners.ended(1, turn, room=500) is None
                found.append(answered(partners))
            assert all(len(read) == length for read in found[: turns - 1])
            assert (found[-1] == "length") != fits and says.ended == ([] if fits else ["length"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_that_no_token_ends_keeps_its_last_and_is_ended_by_the_template(family):
    """A stop string ends a turn without the model's token; what is read after it begins with that token."""
    tokenizer = tool_tokenizer(family)
    end, said = tokenizer.eos_token_id, Says("so")
    partners = Partners([said], None, RolloutConfig(max_turns=9), tokenizer, {}, (end,))
    read, heard = [], []
    for last in ([end], []):
        partners.begin([Request([5], [1], prompt=Prompt(0, GO, [5], {}))])
        assert partners.ended(1, [*tokens(tokenizer, "one two"), *last], room=500) is None
        given = answered(partners)
        read.append([*last, *given])
        heard.append(partners.finished(1, ended(given)).messages[0]["content"])
    assert heard == ["one two"] * 2 and read[0] == read[1]


class Environments:
    """Of the command, in their processes."""

    FILE = SUPPORT / "lost_environments.py"

    def __init__(self, name: str, **rollout: Any) -> None:
        self.tokenizer = tool_tokenizer("hermes")
        rollout = {"max_turns": 4, "tool_timeout_s": 60, "environment": f"{self.FILE}:{name}", **rollout}
        config = build(TrainConfig, {"rollout": rollout, "policy": {"model": "none"}, "run": {"seed": 3}})
        found = partners_of(config, self.tokenizer, (self.tokenizer.eos_token_id,))
        assert found is not None
        self.partners = found

    def opened(self, number: int = 0, step: int = 1) -> Prompt:
        ids = tokens(self.tokenizer, "Go.")
        [prompt] = self.partners.opened([Prompt(number, GO, ids, {})], step)
        return prompt

    def call(self, how: str) -> list[int]:
        text = f"<tool_call>{json.dumps({'name': 'do', 'arguments': {'how': how}})}</tool_call>"
        return [*tokens(self.tokenizer, text), self.tokenizer.eos_token_id]


@pytest.mark.process
def test_a_completion_whose_environment_is_lost_has_no_reward_and_one_that_is_told_of_an_error_has():
    """A method that raises is an answer. A process that ends takes the environment's state with it, and a new one of
    its seat would pay for an episode that never was."""
    environments = Environments("Leaves")
    for how, failure in (("raise", None), ("exit", "ended its process (exit status 5)")):
        partners, prompt = environments.partners, environments.opened()
        partners.begin([Request(prompt.token_ids, [1], max_total_tokens=9999, prompt=prompt)])
        assert partners.ended(1, environments.call(how), room=500) is None
        said = answered(partners)
        if failure is None:
            assert "error: ValueError: no luck" in environments.tokenizer.decode(said)
            end = [*tokens(environments.tokenizer, "so"), environments.tokenizer.eos_token_id]
            assert partners.ended(1, end, room=500) is None
            said = answered(partners)
        assert said == "stop"
        episode = partners.finished(1, ended()).episode
        assert episode.failure == failure and episode.total == (None if failure else 1.0)


@pytest.mark.process
def test_what_an_environment_says_at_the_beginning_is_cut_and_depends_on_step_and_prompt():
    environments = Environments("Leaves", max_tool_tokens=50)
    texts = {
        (number, step): environments.opened(number, step).text[-1]["content"] for number in (0, 1) for step in (1, 2)
    }
    assert len(set(texts.values())) == 4
    for text in texts.values():
        assert text.startswith("Go.") and 48 <= len(tokens(environments.tokenizer, text.removeprefix("Go."))) <= 50
    assert environments.opened(1, 2).text[-1]["content"] == texts[1, 2]
