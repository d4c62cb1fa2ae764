"""Scoring a rollout while it is being sampled."""

from __future__ import annotations

from types import TracebackType

from hybrid_grpo.data.batch import Completion, Prompt, Scores
from hybrid_grpo.rewards.calling import busy_seconds
from hybrid_grpo.rewards.scoring import Call, Rewards


class Stream:
    """The scores of one rollout in the making: a group is scored as soon as its last completion is there.

    Every call of a function gets one group, in whatever order groups are finished. A function that looks at each row
    by itself gives what it gives for all rows at once.

        with Stream(rewards, prompts, num_generations) as stream:
            ...  # calls stream.add for every completion
            scores = stream.scores()

    Leaving the block early, by an exception, drops the calls that are still to come.

    Args:
        prompts: [P]; may be empty.
        num_generations: G

    Raises:
        UserError: see `Rewards.check_columns`.
    """

    def __init__(self, rewards: Rewards, prompts: list[Prompt], num_generations: int) -> None:
        self._rewards = rewards
        self._prompts = prompts
        self._num_generations = num_generations
        # Of all prompts, not of the group: a function is given the same columns as for all rows at once.
        self._columns = rewards.common_columns(prompts)
        self._groups: list[dict[int, Completion]] = [{} for _ in prompts]
        self._calls: dict[int, Call] = {}

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for call in self._calls.values():
            call.pending.cancel()

    def add(self, prompt: int, sample: int, completion: Completion) -> None:
        """Take completion `sample` of prompt `prompt`, decoded. Does not wait, and does not raise what functions do."""
        group = self._groups[prompt]
        assert sample not in group, f"completion {sample} of prompt {prompt} came twice"
        group[sample] = completion
        if len(group) == self._num_generations:
            self._calls[prompt] = self._rewards.start(
                [self._prompts[prompt]] * self._num_generations,
                [group[k] for k in range(self._num_generations)],
                self._columns,
                first_row=prompt * self._num_generations,
            )

    def scores(self) -> Scores:
        """Wait for the functions; the scores [B] are in the order of prompts and samples, whatever came first.

        Raises:
            UserError: see `Rewards.score`.
        """
        return self._rewards.finish(self._in_order())

    @property
    def seconds(self) -> float:
        """Seconds in which functions ran; waits for them."""
        return busy_seconds(call.pending.outcome() for call in self._in_order())

    def _in_order(self) -> list[Call]:
        assert len(self._calls) == len(self._prompts), "a completion is missing"
        return [self._calls[prompt] for prompt in range(len(self._prompts))]
