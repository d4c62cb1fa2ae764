"""The alarms of a run: how long each symptom is tolerated, and what happens after that.

symptoms.py defines the symptoms. Some alarms are also metrics (`health/alarm`, `parity/alarm`), which are added to the
step's metrics.
"""

import math
from collections import defaultdict
from copy import deepcopy
from pathlib import Path
from statistics import fmean

from hybrid_grpo.config import AlarmConfig, AlarmsConfig, GuardConfig, ModelRunConfig
from hybrid_grpo.config.errors import RunStopped, did_you_mean, refuse
from hybrid_grpo.distributed.ranks import all_gather_objects, rank
from hybrid_grpo.records.alarm_records import AlarmRecord
from hybrid_grpo.records.alarms.symptoms import CHANCE, HELD_OUT_FLAT, NON_FINITE, Sign, Symptoms, evaluated_sets
from hybrid_grpo.records.json_lines import read_jsonl
from hybrid_grpo.records.metrics.catalogue import CATALOGUE, find

_CAUSES = {
    "dead_groups": {"constant_reward", "entropy_collapse", "duplicates", "failing_rewards", "truncated"},
    "constant_reward": {"entropy_collapse", "duplicates", "failing_rewards", "truncated"},
    "truncated": {"length_runaway"},
    "ratio": {"parity"},
    "held_out": {"reward_hacking"},
    HELD_OUT_FLAT: {"held_out", "reward_hacking"},
}
"""By symptom, the other symptoms that can cause it. While a cause is bad, only the cause is counted and reported."""

_STARTS = 5
"""Number of values of an alarm from which its way to its limit is measured."""


class RollBack(Exception):
    """Raised on all ranks if the run must go back to a checkpoint before step `since`, at a lower learning rate."""

    def __init__(self, message: str, since: int) -> None:
        super().__init__(message)
        self.since = since


class Alarms:
    """All alarms of a run. After every step, all ranks give them the same metrics, so all ranks act alike.

    Args:
        guard: settings of the alarm `non_finite`, which goes off if metrics are NaN or infinite; None: no such alarm.
        last_step: the last step of the run, in which `non_finite` stops the run or rolls it back without patience.

    Raises UserError if `alarms.numbers` names an unknown metric.
    """

    def __init__(
        self, config: AlarmsConfig | None = None, symptoms: Symptoms | None = None, guard: GuardConfig | None = None,
        last_step: int = 0,
    ) -> None:  # fmt: skip
        self._config, self._no_symptoms = config or AlarmsConfig(), symptoms or Symptoms()
        self._last_step = last_step
        self._limits = {**self._config.named, **self._config.numbers}
        if "held_out" in self._limits:
            self._limits[HELD_OUT_FLAT] = AlarmConfig(above=CHANCE, patience=2)
        if guard is not None:
            self._limits[NON_FINITE] = AlarmConfig(above=0.0, patience=guard.patience, action=guard.non_finite)
        for name in self._config.numbers:
            known = [metric.name for metric in CATALOGUE]
            refuse(find(name) is None, f"alarms.numbers {name} is not a metric: {did_you_mean(name, known)}")
        self._forget()

    def _forget(self) -> None:
        """Be as before the first step."""
        self._symptoms = deepcopy(self._no_symptoms)
        self._bad: dict[str, int] = {}
        """Number of consecutive bad steps, by alarm."""
        self._since: dict[str, int] = {}
        """The step at which the problem began, by alarm."""
        self._starts: dict[str, list[float]] = defaultdict(list)
        """The first values of each alarm, from which its way to its limit is measured."""
        self._first_set = ""
        """The held-out set with which training is compared: the first one that was evaluated."""
        self._due: list[AlarmRecord] = []
        """Alarms of the newest step that stop the run or roll it back."""
        self._note = ""
        self.over: list[AlarmRecord] = []
        """The ends, without messages, of alarms whose problem was over in the newest step."""

    @classmethod
    def of(cls, config: ModelRunConfig) -> "Alarms":
        """Return the alarms of a run with these settings."""
        return cls(config.alarms, Symptoms.of(config), config.guard, config.run.steps)

    @property
    def diverged(self) -> bool:
        """Whether a metric of the newest step is NaN or infinite, in which case its weights must not be saved."""
        return self._bad.get(NON_FINITE, 0) > 0

    @property
    def doubts(self) -> bool:
        """Whether the newest step may yet be rolled back, in which case its checkpoint must not replace older ones."""
        return any(count and self._limits[name].action == "roll_back" for name, count in self._bad.items())

    @property
    def may_skip(self) -> bool:
        """Whether any alarm has the action `skip`, which skips the update of a step."""
        return any(limit.action == "skip" for limit in self._limits.values())

    def skips(self, values: dict[str, float]) -> bool:
        """Return whether the update of a step must be skipped, given the metrics that are known before the update."""
        limits = {name: self._limits[name] for name in self._bad_signs(self._signs(values))}
        return any(
            limit.action == "skip" and self._bad.get(name, 0) + 1 >= limit.patience for name, limit in limits.items()
        )

    def watch(self, step: int, values: dict[str, float]) -> list[AlarmRecord]:
        """Check a step's metrics, add the alarms that are metrics to `values`, and return the alarms that go off."""
        signs = self._signs(values)
        self._add_numbers(values, signs)
        values |= self._closest(signs)
        bad = self._bad_signs(signs)
        records = [AlarmRecord(step, "roll_back", step, self._note, until=step)] if self._note else []
        self._due, self._note, self.over = [], "", []
        for name, sign in signs.items():
            limit, before = self._limits[name], self._bad.get(name, 0)
            self._bad[name] = count = before + 1 if name in bad else 0
            if not count and before >= limit.patience:
                self.over.append(AlarmRecord(step, name, self._since[name], "", limit.action, step - 1))
            if count == 1:
                self._since[name] = sign.since or step
            at_once = name == NON_FINITE and step == self._last_step and limit.action != "say"
            if count < (1 if at_once else limit.patience):
                continue
            ends = limit.action in ("stop", "roll_back")
            message, until = self._message(name, sign), step if ends else None
            record = AlarmRecord(step, name, self._since[name], message, limit.action, until)
            # An alarm is reported once each time it begins.
            records += [record] if count <= limit.patience else []
            self._due += [record] if ends else []
        self._symptoms.remember(step, values)
        return records

    def remember(self, step: int, values: dict[str, float]) -> None:
        """Take in a step's metrics from before the run was resumed, with which later steps are compared. No alarm is
        reported again. Alarms that stop the run or roll it back count from 0, until `load_state_dict` is called."""
        self.watch(step, values)
        self._bad = {name: count for name, count in self._bad.items() if self._limits[name].action in ("say", "skip")}
        self._due = []

    def state_dict(self) -> dict[str, dict[str, int]]:
        """Return the state for a checkpoint: the number of consecutive bad steps, and the step at which the problem
        began, by alarm. An alarm that stops the run or rolls it back at this step will count from 0."""
        due = {record.alarm for record in self._due}
        bad = {name: count for name, count in self._bad.items() if count and name not in due}
        return {"bad": bad, "since": {name: self._since[name] for name in bad}}

    def load_state_dict(self, state: dict[str, dict[str, int]]) -> None:
        """Restore a state that `state_dict` returned; call `recall` first."""
        self._bad, self._since = (
            {name: number for name, number in state[part].items() if name in self._limits} for part in ("bad", "since")
        )

    def recall(self, folder: Path, done: int, note: str = "") -> None:
        """Take in only the metrics in a run's folder up to the step `done`, which rank 0 reads for all ranks. `note`
        says why the run was rolled back to that step, if it was; it is reported with the next step. Collective."""
        self._forget()
        kept = {"step", *self._config.numbers}
        rows = [
            {name: v for name, v in line.items() if v is not None and (name in kept or self._symptoms.needs(name))}
            for line in (read_jsonl(folder / "metrics.jsonl") if rank() == 0 else ())
            if line["step"] <= done
        ]
        for row in all_gather_objects(rows)[0]:
            self.remember(int(row.pop("step")), row)
        self._note = note

    @property
    def stops(self) -> bool:
        """Whether an alarm of the newest step stops the run."""
        return any(record.action == "stop" for record in self._due)

    def act(self, saved: str) -> None:
        """Raise RunStopped or RollBack, on all ranks alike, if an alarm of the newest step requires it. `saved` is the
        part of the message that says which checkpoint there is."""
        due = [record for record in self._due if record.alarm == NON_FINITE] or self._due
        for record in due:
            if record.action == "stop":
                raise RunStopped(
                    f"alarm {record.message}: the run is stopped, no model was exported, and {_way_out(record, saved)}"
                )
        if due:
            raise RollBack(f"alarm {due[0].message}", min(record.since for record in due))

    def _signs(self, values: dict[str, float]) -> dict[str, Sign]:
        signs = {name: sign for name, sign in self._symptoms.signs(values).items() if name in self._limits}
        own = {
            name: Sign(values[name], f"{name} is {values[name]:g}") for name in self._config.numbers if name in values
        }
        return {**signs, **own}

    def _bad_signs(self, signs: dict[str, Sign]) -> set[str]:
        """Return the alarms whose value is bad, except alarms with a cause that is bad too."""
        bad = {name for name, sign in signs.items() if _is_bad(self._limits[name], sign.value)}
        return {name for name in bad if not _CAUSES.get(name, set()) & bad}

    def _closest(self, signs: dict[str, Sign]) -> dict[str, float]:
        """Return how far the alarm that is closest to its limit has come from its first values, as a metric."""
        ways: dict[str, float] = {}
        for name in self._config.named.keys() & signs.keys() - {"throughput_drop"}:  # times differ from run to run
            value, first, limit = signs[name].value, self._starts[name], self._limits[name]
            if not math.isfinite(value):
                continue
            if len(first) < _STARTS:
                first.append(value)
                continue
            start = fmean(first)
            if limit.above is not None and limit.above > start:
                ways[name] = (value - start) / (limit.above - start)
            if limit.below is not None and limit.below < start:
                ways[name] = max(ways.get(name, 0.0), (start - value) / (start - limit.below))
        closest = max(sorted(ways), key=ways.__getitem__, default="")
        return {f"health/closest/{closest}": ways[closest]} if closest else {}

    def _message(self, name: str, sign: Sign) -> str:
        limit, count = self._limits[name], self._bad[name]
        if name == NON_FINITE:
            return f"{name}: {sign.words} ({count} {'step' if count == 1 else 'steps'} in a row; guard.non_finite)"
        bound = f"above {limit.above:g}" if limit.above is not None and sign.value > limit.above else ""
        bound = bound or f"below {limit.below:g}"
        what = "evaluations" if name.startswith("held_out") else "steps"
        many = "" if limit.patience == 1 else f" for {count} {what}"
        setting = f"alarms.{name.removesuffix('_flat')}"
        setting = f"alarms.numbers {name}" if name in self._config.numbers else setting
        return f"{name}: {sign.words} ({sign.value:.4g}, {bound}{many}; {setting})"

    def _add_numbers(self, values: dict[str, float], signs: dict[str, Sign]) -> None:
        """Add to `values` the alarms that are also metrics, and the gap between training and held-out reward."""
        if "parity/logp_abs_diff_mean" in values and "parity" in self._limits:
            gap = values["parity/logp_abs_diff_mean"]
            # A NaN gap is an alarm too.
            values["parity/alarm"] = float(gap != gap or _is_bad(self._limits["parity"], gap))
        sets = evaluated_sets(values)
        if not sets:
            return
        self._first_set = self._first_set or sets[0]
        if "reward/mean" in values and f"{self._first_set}/reward_mean" in values:
            values["health/heldout_gap"] = values["reward/mean"] - values[f"{self._first_set}/reward_mean"]
        if "held_out" in self._limits:
            sign = signs.get("held_out")
            values["health/alarm"] = float(sign is not None and _is_bad(self._limits["held_out"], sign.value))


def _way_out(record: AlarmRecord, saved: str) -> str:
    if record.alarm == NON_FINITE:
        return (
            f"checkpoints of steps before {record.since} are kept: look at rollouts/, lower policy.lr or"
            " policy.max_grad_norm, and continue from one of them with --run.resume auto --run.allow_changes true"
        )
    return f"{saved}: fix the cause and continue with --run.resume auto, or give an earlier checkpoint as run.resume"


def _is_bad(limit: AlarmConfig, value: float) -> bool:
    above = limit.above is not None and value > limit.above
    return above or (limit.below is not None and value < limit.below)
