"""The alarms of a run: how long a symptom is tolerated, and what happens then.

symptoms.py defines the symptoms. Some alarms are also metrics (`health/alarm`, `parity/alarm`), which are added to the
step's numbers.
"""

from pathlib import Path

from hybrid_grpo.config import AlarmConfig, AlarmsConfig, GuardConfig, ModelRunConfig
from hybrid_grpo.config.errors import RunStopped, did_you_mean, refuse
from hybrid_grpo.model.ranks import all_gather_objects, rank
from hybrid_grpo.records.alarm_records import AlarmRecord
from hybrid_grpo.records.alarms.symptoms import NON_FINITE, Sign, Symptoms, evaluated_sets
from hybrid_grpo.records.json_lines import read_jsonl
from hybrid_grpo.records.metrics.catalogue import CATALOGUE, find

_CAUSES = {
    "dead_groups": {"constant_reward", "entropy_collapse", "duplicates", "failing_rewards", "truncated"},
    "constant_reward": {"entropy_collapse", "duplicates", "failing_rewards", "truncated"},
    "truncated": {"length_runaway"},
    "ratio": {"parity"},
    "held_out": {"reward_hacking"},
}
"""Symptoms that follow from others: while one of these causes is bad, only the cause is counted and reported."""


class RollBack(Exception):
    """The run must go on from a checkpoint before the step `since`, at a lower learning rate; raised on all ranks."""

    def __init__(self, message: str, since: int) -> None:
        super().__init__(message)
        self.since = since


class Alarms:
    """All alarms of a run. They see the same numbers on all ranks after every step, so all ranks act alike.

    Args:
        guard: settings of the alarm `non_finite`, for numbers that are not finite; None: no such alarm.
        last_step: the last step of the run, in which non-finite numbers are not tolerated.

    Raises UserError if `alarms.numbers` names an unknown metric.
    """

    def __init__(
        self,
        config: AlarmsConfig | None = None,
        symptoms: Symptoms | None = None,
        guard: GuardConfig | None = None,
        last_step: int = 0,
    ) -> None:
        self._config, self._symptoms = config or AlarmsConfig(), symptoms or Symptoms()
        self._last_step = last_step
        self._limits = {**self._config.named, **self._config.numbers}
        if guard is not None:
            self._limits[NON_FINITE] = AlarmConfig(above=0.0, patience=guard.patience, action=guard.non_finite)
        for name in self._config.numbers:
            known = [metric.name for metric in CATALOGUE]
            refuse(find(name) is None, f"alarms.numbers {name} is not a metric: {did_you_mean(name, known)}")
        self._bad: dict[str, int] = {}
        """Bad steps in a row, by alarm."""
        self._since: dict[str, int] = {}
        """The step at which the problem began, by alarm."""
        self._first_set = ""
        """The held-out set that training is compared with: the first that was evaluated."""
        self._due: list[AlarmRecord] = []
        """Alarms of the newest step that stop the run or roll it back."""
        self.note = ""
        """Why the run was rolled back; reported with the next step."""

    @classmethod
    def of(cls, config: ModelRunConfig) -> "Alarms":
        """The alarms of a run with these settings."""
        return cls(config.alarms, Symptoms.of(config), config.guard, config.run.steps)

    @property
    def diverged(self) -> bool:
        """Whether numbers of the newest step are not finite, so that its weights must not be saved."""
        return self._bad.get(NON_FINITE, 0) > 0

    @property
    def doubts(self) -> bool:
        """Whether the newest step may be rolled back: its checkpoint must not replace older ones."""
        return any(count and self._limits[name].action == "roll_back" for name, count in self._bad.items())

    @property
    def may_skip(self) -> bool:
        """Whether an alarm has the action `skip`."""
        return any(limit.action == "skip" for limit in self._limits.values())

    def skips(self, step: int, values: dict[str, float]) -> bool:
        """Whether the update of a step must be skipped, judging by the numbers that are known before it."""
        limits = {name: self._limits[name] for name in self._bad_signs(self._signs(values))}
        return any(
            limit.action == "skip" and self._bad.get(name, 0) + 1 >= limit.patience for name, limit in limits.items()
        )

    def watch(self, step: int, values: dict[str, float]) -> list[AlarmRecord]:
        """Check the numbers of a step, add to them the alarms that are metrics, and return the alarms that go off."""
        signs = self._signs(values)
        self._add_numbers(values, signs)
        bad = self._bad_signs(signs)
        records = [AlarmRecord(step, "roll_back", step, self.note)] if self.note else []
        self._due, self.note = [], ""
        for name, sign in signs.items():
            limit = self._limits[name]
            self._bad[name] = count = self._bad.get(name, 0) + 1 if name in bad else 0
            if count == 1:
                self._since[name] = sign.since or step
            at_once = name == NON_FINITE and step == self._last_step and limit.action != "say"
            if count < (1 if at_once else limit.patience):
                continue
            record = AlarmRecord(step, name, self._since[name], self._message(name, sign), limit.action)
            # An alarm is reported once each time it begins.
            records += [record] if count <= limit.patience else []
            self._due += [record] if limit.action in ("stop", "roll_back") else []
        self._symptoms.remember(step, values)
        return records

    def remember(self, step: int, values: dict[str, float]) -> None:
        """Take the numbers of a step before the run was resumed, which later ones are compared with. What was reported
        then is not reported again; alarms that stop or roll back start to count anew, until `load_state_dict`."""
        self.watch(step, values)
        self._bad = {name: count for name, count in self._bad.items() if self._limits[name].action in ("say", "skip")}
        self._due = []

    def state_dict(self) -> dict[str, dict[str, int]]:
        """Bad steps in a row and the first of them, by alarm, as a checkpoint holds them. An alarm that has stopped the
        run counts from 0 when the run goes on."""
        due = {record.alarm for record in self._due}
        bad = {name: count for name, count in self._bad.items() if count and name not in due}
        return {"bad": bad, "since": {name: self._since[name] for name in bad}}

    def load_state_dict(self, state: dict[str, dict[str, int]]) -> None:
        """Continue from a saved state, after `recall`."""
        self._bad, self._since = (
            {name: number for name, number in state[part].items() if name in self._limits} for part in ("bad", "since")
        )

    def recall(self, folder: Path, done: int) -> None:
        """Remember the numbers in a run's folder up to the step `done`; rank 0 reads them. Collective."""
        rows = [
            {name: value for name, value in line.items() if name == "step" or self._needs(name, value)}
            for line in (read_jsonl(folder / "metrics.jsonl") if rank() == 0 else ())
            if line["step"] <= done
        ]
        for row in all_gather_objects(rows)[0]:
            self.remember(int(row.pop("step")), row)

    @property
    def stops(self) -> bool:
        """Whether an alarm of the newest step stops the run."""
        return any(record.action == "stop" for record in self._due)

    def act(self, saved: str) -> None:
        """Raise RunStopped or RollBack, on all ranks alike, if an alarm of the newest step requires it. `saved` says in
        the message which checkpoint there is."""
        due = [record for record in self._due if record.alarm == NON_FINITE] or self._due
        for record in due:
            if record.action == "stop":
                raise RunStopped(
                    f"alarm {record.message}: the run is stopped, no model was exported, and {_way_out(record, saved)}"
                )
        if due:
            raise RollBack(f"alarm {due[0].message}", min(record.since for record in due))

    def _needs(self, name: str, value: float | None) -> bool:
        return value is not None and (name in self._config.numbers or self._symptoms.needs(name))

    def _signs(self, values: dict[str, float]) -> dict[str, Sign]:
        signs = {name: sign for name, sign in self._symptoms.signs(values).items() if name in self._limits}
        own = {
            name: Sign(values[name], f"{name} is {values[name]:g}") for name in self._config.numbers if name in values
        }
        return {**signs, **own}

    def _bad_signs(self, signs: dict[str, Sign]) -> set[str]:
        """The alarms whose value is bad, without those that follow from others."""
        bad = {name for name, sign in signs.items() if _is_bad(self._limits[name], sign.value)}
        return {name for name in bad if not _CAUSES.get(name, set()) & bad}

    def _message(self, name: str, sign: Sign) -> str:
        limit, count = self._limits[name], self._bad[name]
        if name == NON_FINITE:
            return f"{name}: {sign.words} ({count} {'step' if count == 1 else 'steps'} in a row; guard.non_finite)"
        bound = f"above {limit.above:g}" if limit.above is not None and sign.value > limit.above else ""
        bound = bound or f"below {limit.below:g}"
        what = "evaluations" if name == "held_out" else "steps"
        many = "" if limit.patience == 1 else f" for {count} {what}"
        setting = f"alarms.numbers {name}" if name in self._config.numbers else f"alarms.{name}"
        return f"{name}: {sign.words} ({sign.value:.4g}, {bound}{many}; {setting})"

    def _add_numbers(self, values: dict[str, float], signs: dict[str, Sign]) -> None:
        """Add the alarms that are also metrics, and the gap to the held-out reward."""
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
            " policy.max_grad_norm, and go on from one of them with --run.resume auto --run.allow_changes true"
        )
    return (
        f"{saved}: change what is wrong and go on with --run.resume auto, or give an earlier checkpoint as run.resume"
    )


def _is_bad(limit: AlarmConfig, value: float) -> bool:
    above = limit.above is not None and value > limit.above
    return above or (limit.below is not None and value < limit.below)
