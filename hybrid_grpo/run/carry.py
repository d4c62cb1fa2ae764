"""Carries the longest groups of a step into the next one, so that no step waits for them (partial rollouts: Kimi k1.5,
arXiv:2501.12599, section 2.6; APRIL, arXiv:2509.18521).

A step of N prompts samples N + K groups. It ends when N of them are whole, and learns from these; the other K continue
in the next step, sampled by the policy of that step, beside N new prompts. Tokens keep the log-probabilities that were
recorded when they were sampled.

Which groups are left does not depend on how fast ranks are: a group's span is the number of tokens that its longest
completion got in this step, and the N groups of the shortest spans are learned from. The longest of these spans ends
the step: tokens that a rank has sampled beyond it for other groups are dropped. So a run can be repeated, on any number
of ranks.
"""

import json
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import reduce
from itertools import chain
from typing import Any

from hybrid_grpo.config import BatchPlan, RolloutConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.batch import Numbers, Rollout, Scores
from hybrid_grpo.data.completion import Completion, Prompt
from hybrid_grpo.data.completion_records import completion_of, record_of
from hybrid_grpo.data.loader import StepLoader
from hybrid_grpo.distributed.ranks import Board, all_gather_objects, rank
from hybrid_grpo.generation import OnFinish
from hybrid_grpo.grpo.resampling import group_slots

_LOOK_S = 0.01
"""Seconds between two looks at whether a step's sampling is to end."""
Serial = tuple[int, int]
"""The step in which a group was begun, and its number among the prompts drawn in that step."""
Exchange = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True, order=True)
class FinishedGroup:
    """A group whose completions have all ended."""

    span: int
    """Number of tokens that its longest completion got in this step."""
    serial: Serial
    is_due: bool
    """Whether it must not be carried any further."""


@dataclass(frozen=True)
class OpenGroup:
    """A group between two steps."""

    serial: Serial
    prompt: Prompt
    completions: list[Completion]


def shortest(found: Iterable[FinishedGroup], count: int, due: int) -> list[FinishedGroup] | None:
    """Return the groups to learn from: all `due` groups that must not be carried any further, and of the others those
    of the shortest spans, `count` in all. None if there are not enough of them yet."""
    first = sorted(found, key=lambda group: (not group.is_due, group))[:count]
    return first if len(first) == count and sum(group.is_due for group in first) == due else None


class Carry:
    """The groups that are carried, K of them between two steps, and how a step's sampling ends.

    Args:
        config, plan: the run's settings and batch equation.
        prompts: all prompts of the run.
        exchange: see `Assignment`.
    """

    def __init__(self, config: RolloutConfig, plan: BatchPlan, prompts: Sequence[Prompt], exchange: Exchange) -> None:
        self._config, self._plan, self._exchange = config, plan, exchange
        self._prompts = {(prompt.source, prompt.id): prompt for prompt in prompts}
        share, parts, ranks = plan.prompts_per_rank, plan.num_minibatches, plan.world_size
        self._slots = [group_slots(share, parts, other, ranks) for other in range(ranks)]
        """Of each rank, among those of a step."""
        self._open: list[OpenGroup] = []
        """Of all ranks, the same on every rank, in order."""
        self.learned: list[int] = []
        """The groups of this rank's rollout that are learned from, oldest first."""

    def begin(self, prompts: list[Prompt], loader: StepLoader, step: int) -> list[Prompt]:
        """Return this rank's prompts of a step: new ones, more if too few are carried, and carried ones. Collective."""
        plan, own, total = self._plan, rank(), self._config.prompts_per_step
        missing = self._config.carried_groups - len(self._open)
        more = range(own, missing, plan.world_size)
        if missing > 0:
            prompts = prompts + loader.more_prompts(missing, list(more))
        carried = self._open[own :: plan.world_size]
        new = [(step, number) for number in (*self._slots[own], *(total + number for number in more))]
        self._step, self._serials = step, [*new, *(group.serial for group in carried)]
        self._is_due = [False] * len(new) + [self._is_old(group) for group in carried]
        self._due = sum(map(self._is_old, self._open))
        self.resumed_from = {index: group.completions for index, group in enumerate(carried, len(new))}
        self._finished: list[FinishedGroup] = []
        self._board, self._look_at = Board(f"carry/{step}"), 0.0
        return [*prompts, *(group.prompt for group in carried)]

    def _is_old(self, group: OpenGroup) -> bool:
        return len(group.completions[0].carried) >= self._config.max_carries

    def by_group(self, on_finish: OnFinish | None) -> OnFinish:
        """Return a function for `Policy.rollout`, which calls `on_finish` for a completion once its group is whole."""
        held: dict[int, list[tuple[int, Completion]]] = defaultdict(list)

        def finished(prompt: int, sample: int, completion: Completion) -> None:
            held[prompt].append((sample, completion))
            if len(held[prompt]) == self._plan.num_generations:
                span = max(completion.new_tokens for _, completion in held[prompt])
                self._finished.append(FinishedGroup(span, self._serials[prompt], self._is_due[prompt]))
                self._board.post([astuple(group) for group in self._finished])
                if on_finish is not None:
                    for number, ended in held[prompt]:
                        on_finish(prompt, number, ended)

        return finished

    def should_stop(self, least: Callable[[], int]) -> bool:
        """Return whether this rank need not sample any further; see `generation.ShouldStop`."""
        now = time.perf_counter()
        if now < self._look_at:
            return False
        self._look_at = now + _LOOK_S
        chosen = self._chosen(
            [FinishedGroup(span, tuple(serial), due) for span, serial, due in chain(*self._board.read())]
        )
        return chosen is not None and least() >= max(group.span for group in chosen)

    def _chosen(self, found: Iterable[FinishedGroup]) -> list[FinishedGroup] | None:
        return shortest(found, self._config.prompts_per_step, self._due)

    def end(self, rollout: Rollout) -> Rollout:
        """Decide which groups are learned from; the others are carried. Return this rank's rollout without the tokens
        after the end of the step's sampling. Collective."""
        chosen = self._chosen(chain(*all_gather_objects(self._finished)))
        assert chosen is not None, "ranks sample until there are enough"
        self._board.close()
        self._span = max(group.span for group in chosen)
        self._place = {serial: slot for slot, serial in enumerate(sorted(group.serial for group in chosen))}
        rollout = replace(rollout, completions=[c.cut(c.old_tokens + self._span) for c in rollout.completions])
        by_serial = sorted(range(len(self._serials)), key=self._serials.__getitem__)
        self.learned = [index for index in by_serial if self._serials[index] in self._place]
        left = [self._carried(rollout, index) for index in by_serial if self._serials[index] not in self._place]
        self._open = sorted(chain(*all_gather_objects(left)), key=lambda group: group.serial)
        return rollout

    def _carried(self, rollout: Rollout, index: int) -> OpenGroup:
        prompt, group = rollout.prompts[index], rollout.groups([index])
        completions = [completion.carry() for completion in group.completions]
        return OpenGroup(self._serials[index], replace(prompt, first_step=prompt.first_step or self._step), completions)

    def numbers(self, rollout: Rollout) -> Numbers:
        """Return metrics of the groups that were learned from, and of those that are carried on."""
        completions, tokens = rollout.completions, rollout.num_tokens
        carried = [completion for group in self._open for completion in group.completions]
        return {
            "carry/span": (self._span, 1),
            "carry/old_frac": (sum(c.old_tokens for c in completions) / tokens, tokens),
            "carry/policies_max": (max(c.policies for c in completions), 1),
            "carry/open_length": (sum(len(c.token_ids) for c in carried) / len(carried), 1),
        }

    def gather(self, rollout: Rollout, scores: Scores) -> tuple[Rollout, Scores]:
        """Return the groups of this rank's share of the step, and their scores. Collective.

        Args:
            rollout: all groups that this rank sampled.
            scores: of those in `learned`, in that order.
        """
        rollout = rollout.groups(self.learned)
        if self._plan.world_size == 1:
            return rollout, scores
        own = [self._place[self._serials[index]] for index in self.learned]
        size, sent = rollout.num_generations, []
        for slots in self._slots:
            chosen = [index for index, slot in enumerate(own) if slot in set(slots)]
            sent.append(([own[index] for index in chosen], rollout.groups(chosen), scores.groups(chosen, size)))
        taken, rollouts, scores_of = zip(*self._exchange(sent), strict=True)
        slots = [slot for of_rank in taken for slot in of_rank]
        order = sorted(range(len(slots)), key=slots.__getitem__)
        return reduce(Rollout.joined, rollouts).groups(order), reduce(Scores.joined, scores_of).groups(order, size)

    def state_dict(self) -> list[dict[str, Any]]:
        """The carried groups of all ranks; the same on every rank."""
        return [
            {
                "prompt": (group.prompt.source, group.prompt.id, group.prompt.epoch),
                "checksum": _checksum(self._prompts[group.prompt.source, group.prompt.id]),
                "serial": group.serial,
                "completions": [json.dumps(record_of(completion)) for completion in group.completions],
            }
            for group in self._open
        ]

    def load_state_dict(self, state: Collection[dict[str, Any]]) -> None:
        """Continue from a saved state. Raises UserError if the data lacks one of its prompts as it was."""
        self._open = []
        for group in state:
            source, number, epoch = group["prompt"]
            prompt = self._prompts.get((source, number))
            # Checkpoints of older versions have no checksums.
            if prompt is None or group.get("checksum", _checksum(prompt)) != _checksum(prompt):
                raise UserError(
                    f"rollout.carry: the checkpoint carries completions of prompt {number}, which the data lacks or has"
                    " changed: resume with the same data, or start anew with another run.name"
                )
            prompt = replace(prompt, epoch=epoch, first_step=group["serial"][0])
            completions = [completion_of(json.loads(record)) for record in group["completions"]]
            self._open.append(OpenGroup(tuple(group["serial"]), prompt, completions))


def _checksum(prompt: Prompt) -> int:
    return zlib.crc32(repr(prompt.token_ids).encode())
