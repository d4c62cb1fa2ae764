"""Notices reward functions that find no answer in any completion, as when prompts ask for another form of answers."""

import sys
from collections.abc import Iterable, Mapping

from hybrid_grpo.data.batch import Scores
from hybrid_grpo.distributed.ranks import rank

ANSWERS = ("answer", "pred")
"""Names under which outcome functions store the answers that they read; `pred` is verl's."""
_ROLLOUTS = 3
"""Rollouts without any answer after which the function is reported."""
_SHOWN = 60


class UnreadAnswers:
    """The functions that store answers and have found none so far. `forms`: what each function reads, by its name."""

    def __init__(self, forms: Mapping[str, str]) -> None:
        self._forms = forms
        self._counts: dict[str, list[int]] = {}
        """By function, the number of completions of each rollout."""
        self._done: set[str] = set()
        """Functions that have found an answer, or have been reported."""

    def add(self, scores: Scores, texts: Iterable[str]) -> None:
        """Look at the scores of a rollout's completions, which have these texts."""
        for column, answers in scores.extra.items():
            name, _, stored = column.rpartition("/")
            if stored not in ANSWERS or name in self._done or not answers:
                continue
            if any(answer not in (None, "") for answer in answers):
                self._done.add(name)
                continue
            self._counts.setdefault(name, []).append(len(answers))
            self._last = next(iter(texts), "")
            if len(self._counts[name]) == _ROLLOUTS:
                self.report()

    def report(self) -> None:
        """Print, on rank 0, which functions have found no answer in any completion so far."""
        for name in self._counts.keys() - self._done:
            self._done.add(name)
            if rank() == 0:
                form = self._forms.get(name, "the form that it reads")
                print(
                    f"rewards: {name} found no answer in any of {sum(self._counts[name])} completions, such as"
                    f" {self._last[-_SHOWN:]!r}: let the prompts ask for {form}", file=sys.stderr, flush=True,
                )  # fmt: skip
