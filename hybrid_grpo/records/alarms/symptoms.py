"""Symptoms: numbers that show what may be wrong with a run, computed from the metrics of this and earlier steps.

A symptom is a pure function of logged metrics, which are the same on all ranks. alarms.py decides when a symptom sets
off an alarm, and what happens then.
"""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

from hybrid_grpo.config import ModelRunConfig, TrainConfig

NON_FINITE = "non_finite"
"""Name of the alarm that the section `guard` configures."""
HELD_OUT_FLAT = "held_out_flat"
"""Name of the warning that belongs to the alarm `held_out`."""
_FIRST = 10
"""Number of steps at the start of a run with which later steps are compared."""
_RECENT, _BEFORE, _FEWEST = 60, 20, 5
"""A metric's usual value is its median over the last `_RECENT` steps except the newest `_BEFORE`, so that a problem
does not shift it at once. Early in a run, it is the median over the first `_FEWEST` steps."""
_SMOOTH = 10
"""Number of steps over which `reward_hacking` and `held_out_flat` average."""
CHANCE, _HELD_OUT_CHANCE = 4.0, 2.0
"""Number of standard errors that a fall must exceed to count as more than chance: first for the outcome in training,
which is tested at every step (a rise of the reward likewise), then for held-out accuracy."""
_ENTROPY = 5.0
"""Entropy of a completion, in nats, above which identical completions should be rare."""
_FINITE = re.compile(r"policy/(kl|ratio_max|entropy)|parity/logp_abs_diff_mean|.*/(loss|grad_norm)")
"""Matches the names of metrics that are never NaN or infinite in a healthy run."""
_KEPT = {"reward/mean", "completion/length_mean", "completion/clipped_frac", "throughput/generated_tokens_per_s"}
"""Metrics that are kept so that later steps can be compared with them."""
_OTHERS = re.compile(r"reward/[^/]+/(mean|failed_frac)|eval/[^/]+/(accuracy|reward_mean|stderr)")


@dataclass(frozen=True)
class Sign:
    """One symptom at one step."""

    value: float
    """The number to which the alarm's limits apply; NaN if it cannot be bad."""
    words: str
    """Text that says what is wrong, with the numbers."""
    since: int | None = None
    """The step at which the problem began; None if that is the step of the first bad value."""


@dataclass(frozen=True)
class _Best:
    """The best value so far of a metric that should rise, with its step and the training reward at that time."""

    step: int
    value: float
    reward: float


class Symptoms:
    """Finds the symptoms of a run from the metrics of its steps, which must be passed in order.

    Args:
        outcome: name of the reward function that tells right answers from wrong ones; empty if there is none.
        rewarded: whether the policy learns from rewards alone, which differ within groups.
    """

    def __init__(self, outcome: str = "", *, rewarded: bool = True) -> None:
        self._outcome, self._rewarded = outcome, rewarded
        self._past: dict[str, list[float]] = defaultdict(list)
        """Values of the steps so far, by metric; the key `outcome` holds the means of the outcome's reward function."""
        self._best: _Best | None = None
        """The best outcome in training, averaged over `_SMOOTH` steps."""
        self._held_out: dict[str, _Best] = {}
        """The best evaluation of each held-out set. If it was made before the first step, its training reward is NaN
        until that step is done, and then the reward of that step."""
        self._first: dict[str, tuple[int, float]] = {}
        """The step and the accuracy of the first evaluation of each held-out set."""
        self._rewards_seen: dict[str, int] = {}
        """Number of training rewards before the latest evaluation of each held-out set."""

    @classmethod
    def of(cls, config: ModelRunConfig) -> "Symptoms":
        """Return the symptoms of a run with these settings."""
        if not isinstance(config, TrainConfig):
            return cls()
        outcome = config.eval.outcome or next(iter(config.reward_names), "")
        return cls(outcome, rewarded=all(of.teaches == "nothing" for of in config.active_features))

    def needs(self, name: str) -> bool:
        """Return whether any symptom needs this metric."""
        return name in _NEEDED or _OTHERS.fullmatch(name) is not None

    def signs(self, values: dict[str, float]) -> dict[str, Sign]:
        """Return the symptoms of a step, by alarm. Symptoms for which the step lacks metrics are left out."""
        found = {name: of(self, values) for name, (of, needed) in _SYMPTOMS.items() if values.keys() >= {*needed}}
        return {name: sign for name, sign in found.items() if sign is not None}

    def remember(self, step: int, values: dict[str, float]) -> None:
        """Remember the metrics of a step, with which later steps are compared."""
        for name in _KEPT & values.keys():
            self._past[name].append(values[name])
        reward, outcome = values.get("reward/mean"), values.get(f"reward/{self._outcome}/mean")
        if reward is not None:
            for stage, best in self._held_out.items():
                if math.isnan(best.reward):
                    self._held_out[stage] = _Best(best.step, best.value, reward)
        if reward is not None and outcome is not None:
            self._past["outcome"].append(outcome)
            rewards, outcomes = self._past["reward/mean"][-_SMOOTH:], self._past["outcome"][-_SMOOTH:]
            if len(outcomes) == _SMOOTH and (self._best is None or fmean(outcomes) >= self._best.value):
                self._best = _Best(step, fmean(outcomes), fmean(rewards))
        for stage in evaluated_sets(values):
            accuracy, trained = values[f"{stage}/accuracy"], self._reward_since_evaluation(stage)
            self._first.setdefault(stage, (step, accuracy))
            self._rewards_seen[stage] = len(self._past["reward/mean"])
            if stage not in self._held_out or accuracy >= self._held_out[stage].value:
                self._held_out[stage] = _Best(step, accuracy, trained)

    def _reward_since_evaluation(self, stage: str, *newest: float) -> float:
        """Return the mean training reward since a set's last evaluation, including `newest`; NaN if there was none."""
        rewards = [*self._past["reward/mean"][self._rewards_seen.get(stage, 0) :], *newest]
        return fmean(rewards) if rewards else math.nan

    def _non_finite(self, values: dict[str, float]) -> Sign:
        broken = [name for name, value in values.items() if _FINITE.fullmatch(name) and not math.isfinite(value)]
        return Sign(len(broken), f"{', '.join(broken)} not finite: the policy has diverged, or its inputs hold NaN")

    def _entropy(self, values: dict[str, float]) -> Sign:
        entropy, right = values["policy/entropy"], values.get("group/all_right_frac", 0.0)
        return Sign(
            entropy if right < 0.5 else math.nan,
            f"entropy is {entropy:.4f} nats per token, with {right:.0%} of the groups all right: the policy has stopped"
            " exploring",
        )

    def _length(self, values: dict[str, float]) -> Sign:
        words = "completions have {:.1f} tokens, {:.1f} times as many as usual"
        return self._compared("completion/length_mean", values, words)

    def _throughput(self, values: dict[str, float]) -> Sign | None:
        if "time/profiled" in values:  # tracing takes time
            return None
        words = "{:.0f} tokens are generated per second, {:.2f} times the usual rate"
        return self._compared("throughput/generated_tokens_per_s", values, words)

    def _compared(self, name: str, values: dict[str, float], words: str) -> Sign:
        """Return the symptom whose value is a metric divided by its usual value."""
        recent, usual = self._past[name][-_RECENT:], math.nan
        if len(recent) >= _FEWEST:
            usual = median(recent[: max(_FEWEST, len(recent) - _BEFORE)])
        share = values[name] / usual if usual else math.nan
        return Sign(share, words.format(values[name], share))

    def _truncated(self, values: dict[str, float]) -> Sign:
        share, start = values["completion/clipped_frac"], _start(self._past["completion/clipped_frac"])
        return Sign(share - start, f"{share:.0%} of completions are cut at the length limit, {start:.0%} at the start")

    def _dead_groups(self, values: dict[str, float]) -> Sign | None:
        dead, right = values["group/zero_std_frac"], values.get("group/all_right_frac", 0.0)
        words = f"{dead:.0%} of the groups give no gradient, and in {right:.0%} all completions are right"
        return Sign(dead - right, words) if self._rewarded else None

    def _constant(self, values: dict[str, float]) -> Sign | None:
        spread, start = values["reward/max"] - values["reward/min"], _start(self._past["reward/mean"])
        learned = values.get("group/all_right_frac", 0.0) > 0.99 and values["reward/mean"] > start
        words = f"all completions have the reward {values['reward/max']:g}: there is no gradient"
        return Sign(math.nan if learned else spread, words) if self._rewarded else None

    def _hacking(self, values: dict[str, float]) -> Sign | None:
        functions = sum(re.fullmatch("reward/[^/]+/mean", name) is not None for name in values)
        outcome, best = values.get(f"reward/{self._outcome}/mean"), self._best
        if functions < 2 or outcome is None or best is None:
            return None
        outcomes = [*self._past["outcome"][1 - _SMOOTH :], outcome]
        rewards = [*self._past["reward/mean"][1 - _SMOOTH :], values["reward/mean"]]
        now, reward, fall = fmean(outcomes), fmean(rewards), best.value - fmean(outcomes)
        return Sign(
            fall if reward > best.reward and fall > CHANCE * _error(outcomes) else math.nan,
            f"{self._outcome} fell from {best.value:.3f} at step {best.step} to {now:.3f} in training, while the reward"
            f" rose from {best.reward:.3f} to {reward:.3f}: other reward functions reward wrong completions",
            best.step + 1,
        )

    def _heldout(self, values: dict[str, float]) -> Sign | None:
        signs = [self._of_set(stage, values) for stage in evaluated_sets(values) if stage in self._held_out]
        return max(signs, key=lambda sign: -math.inf if math.isnan(sign.value) else sign.value, default=None)

    def _flat(self, values: dict[str, float]) -> Sign | None:
        rewards = [*self._past["reward/mean"], values["reward/mean"]]
        sets = [stage for stage in evaluated_sets(values) if stage in self._first]
        if not sets or len(rewards) < 2 * _SMOOTH:
            return None
        still = [stage for stage in sets if values[f"{stage}/accuracy"] <= self._first[stage][1] < 1]
        start, now = fmean(rewards[:_SMOOTH]), fmean(rewards[-_SMOOTH:])
        error = max(math.sqrt(2) * _error(rewards[-_SMOOTH:]), 1e-9)
        step, first = self._first[(still or sets)[0]]
        return Sign(
            (now - start) / error if still else math.nan,
            f"held-out accuracy is {values[f'{(still or sets)[0]}/accuracy']:.3f} after {first:.3f} at step {step},"
            f" while the training reward rose from {start:.3f} to {now:.3f}: a warning that the policy may be learning"
            " the reward functions instead of the task, though the evaluations do not prove it yet",
        )

    def _of_set(self, stage: str, values: dict[str, float]) -> Sign:
        accuracy, best = values[f"{stage}/accuracy"], self._held_out[stage]
        trained = self._reward_since_evaluation(stage, *(values[name] for name in ("reward/mean",) if name in values))
        fall = best.value - accuracy
        # For the difference of two evaluations, treated as if their prompts differed.
        chance = _HELD_OUT_CHANCE * math.sqrt(2) * values.get(f"{stage}/stderr", 0.0)
        of_set = "" if len(self._held_out) == 1 else f" of {stage.removeprefix('eval/')}"
        return Sign(
            fall if trained > best.reward and fall > chance else math.nan,
            f"held-out accuracy{of_set} is {accuracy:.3f} after {best.value:.3f} at step {best.step}, while the"
            f" training reward rose from {best.reward:.3f} to {trained:.3f}: the policy may be learning the reward"
            " functions instead of the task", best.step + 1,
        )  # fmt: skip

    def _duplicates(self, values: dict[str, float]) -> Sign:
        share = values["completion/duplicate_frac"]
        entropy = values["policy/entropy"] * values["completion/length_mean"]
        return Sign(
            share if entropy > _ENTROPY else math.nan,
            f"{share:.0%} of completions equal another one in their group, although the policy has {entropy:.1f} nats"
            " of entropy per completion: the samples do not come from the policy",
        )

    def _failing(self, values: dict[str, float]) -> Sign | None:
        shares = {name: share for name, share in values.items() if re.fullmatch("reward/[^/]+/failed_frac", name)}
        worst = max(shares, key=lambda name: shares[name], default=None)
        if worst is None:
            return None
        return Sign(
            shares[worst], f"reward function {worst.split('/')[1]} failed on {shares[worst]:.0%} of completions"
        )


def _error(values: list[float]) -> float:
    """Return the standard error of the mean of successive values, whatever their trend."""
    differences = (one - other for one, other in itertools.pairwise(values))
    return math.sqrt(fmean(d * d for d in differences) / 2 / len(values))  # differences have twice a value's variance


def _start(values: list[float]) -> float:
    """Return the mean over the first `_FIRST` steps; NaN while there are fewer than `_FEWEST`."""
    return fmean(values[:_FIRST]) if len(values) >= _FEWEST else math.nan


def _plain(name: str, words: str) -> tuple[Callable[[Symptoms, dict[str, float]], Sign], tuple[str]]:
    return lambda _, values: Sign(values[name], words.format(values[name])), (name,)


_SYMPTOMS: dict[str, tuple[Callable[[Symptoms, dict[str, float]], Sign | None], tuple[str, ...]]] = {
    NON_FINITE: (Symptoms._non_finite, ()),
    "entropy_collapse": (Symptoms._entropy, ("policy/entropy",)),
    "length_runaway": (Symptoms._length, ("completion/length_mean",)),
    "truncated": (Symptoms._truncated, ("completion/clipped_frac",)),
    "dead_groups": (Symptoms._dead_groups, ("group/zero_std_frac",)),
    "constant_reward": (Symptoms._constant, ("reward/mean", "reward/max", "reward/min")),
    "reward_hacking": (Symptoms._hacking, ("reward/mean",)),
    "held_out": (Symptoms._heldout, ()),
    HELD_OUT_FLAT: (Symptoms._flat, ("reward/mean",)),
    "kl": _plain("policy/kl", "the policy is {:.3g} nats per token away from the reference"),
    "ratio": _plain("policy/ratio_max", "a token became {:.4g} times as likely within one step"),
    "parity": _plain(
        "parity/logp_abs_diff_mean",
        "sampler and training forward differ by {:.4f} nats per token on average: old_logp is not the policy's"
        " log-probability, so ratios and clipping are wrong",
    ),
    "duplicates": (Symptoms._duplicates, ("completion/duplicate_frac", "completion/length_mean", "policy/entropy")),
    "frozen_tensors": _plain("policy/frozen_tensors", "no gradient reaches tensors that should be trained"),
    "throughput_drop": (Symptoms._throughput, ("throughput/generated_tokens_per_s",)),
    "failing_rewards": (Symptoms._failing, ()),
}
"""By alarm: the function that computes its symptom, and the metrics that this function needs."""
_NEEDED = {"group/all_right_frac", *(name for _, needed in _SYMPTOMS.values() for name in needed)}


def evaluated_sets(values: dict[str, float]) -> list[str]:
    """Return the names of the held-out sets that were evaluated in a step, such as `eval/heldout`."""
    return [name.removesuffix("/accuracy") for name in values if re.fullmatch("eval/[^/]+/accuracy", name)]
