"""Alarms over the numbers of a run: which symptom has lasted too long, how that is said, and what is done about it.

What a symptom is stands in symptoms.py. An alarm is also a number (`health/alarm`, `parity/alarm`), which is added to
those it was made from.
"""

from pathlib import Path

from hybrid_grpo.config import AlarmConfig, AlarmsConfig
from hybrid_grpo.config.errors import RunStopped, did_you_mean, refuse
from hybrid_grpo.model.ranks import all_gather_objects, rank
from hybrid_grpo.records.alarms.divergence import RollBack
from hybrid_grpo.records.alarms.symptoms import Sign, Symptoms
from hybrid_grpo.records.files import read_jsonl
from hybrid_grpo.records.metrics.catalogue import CATALOGUE, find
from hybrid_grpo.records.said import Said

_CAUSES = {
    "dead_groups": {"constant_reward", "entropy_collapse", "duplicates", "failing_rewards", "truncated"},
    "constant_reward": {"entropy_collapse", "duplicates", "failing_rewards", "truncated"},
    "truncated": {"length_runaway"},
    "ratio": {"parity"},
    "held_out": {"reward_hacking"},
}
"""Symptoms that follow from others: while one of those is bad they are not counted, so that the cause is said alone."""


class Alarms:
    """All alarms of a run. They see the numbers of every step, which all ranks share, so that all ranks do the same.

    Raises UserError where `alarms.numbers` names a metric that there is not.
    """

    def __init__(self, config: AlarmsConfig | None = None, symptoms: Symptoms | None = None) -> None:
        self._config, self._symptoms = config or AlarmsConfig(), symptoms or Symptoms()
        self._limits = {**self._config.named, **self._config.numbers}
        for name in self._config.numbers:
            known = [metric.name for metric in CATALOGUE]
            refuse(find(name) is None, f"alarms.numbers {name} is not a metric: {did_you_mean(name, known)}")
        self._bad: dict[str, int] = {}
        """Bad steps in a row, by alarm."""
        self._since: dict[str, int] = {}
        """The first of them."""
        self._first_set = ""
        """The held-out set that training is compared with: the first that was evaluated."""
        self._due: list[Said] = []
        """Alarms after the newest step that ask for more than words."""
        self.note = ""
        """Why the run went back, which is said with the next step."""

    @property
    def doubts(self) -> bool:
        """Whether the newest step may be one to go back behind: it should not push out older checkpoints."""
        return any(count and self._limits[name].action == "roll_back" for name, count in self._bad.items())

    @property
    def may_skip(self) -> bool:
        """Whether there are alarms after which nothing is learned from a step."""
        return any(limit.action == "skip" for limit in self._limits.values())

    def skips(self, step: int, values: dict[str, float]) -> bool:
        """Whether nothing is to be learned from a step, by its numbers as far as they are known."""
        limits = {name: self._limits[name] for name in self._bad_signs(self._seen(step, values))}
        return any(
            limit.action == "skip" and self._bad.get(name, 0) + 1 >= limit.patience for name, limit in limits.items()
        )

    def watch(self, step: int, values: dict[str, float]) -> list[Said]:
        """Add the alarms to the numbers of a step; return those that go off with it."""
        signs = self._seen(step, values)
        self._add_numbers(values, signs)
        bad = self._bad_signs(signs)
        said = [Said(step, "roll_back", step, self.note)] if self.note else []
        self._due, self.note = [], ""
        for name, sign in signs.items():
            limit = self._limits[name]
            self._bad[name] = self._bad.get(name, 0) + 1 if name in bad else 0
            if self._bad[name] == 1:
                self._since[name] = sign.since or step
            if self._bad[name] < limit.patience:
                continue
            alarm = Said(step, name, self._since[name], self._words(name, sign), limit.action)
            # Once for every time that it begins.
            said += [alarm] if self._bad[name] == limit.patience else []
            self._due += [alarm] if limit.action in ("stop", "roll_back") else []
        self._symptoms.remember(step, values)
        return said

    def remember(self, step: int, values: dict[str, float]) -> None:
        """Take the numbers of a step before the run was resumed, which later ones are compared with. What was said then
        is not said again; what stops a run or goes back has patience anew, until `load_state_dict`."""
        self.watch(step, values)
        self._bad = {name: count for name, count in self._bad.items() if self._limits[name].action in ("say", "skip")}
        self._due = []

    def state_dict(self) -> dict[str, dict[str, int]]:
        """Bad steps in a row and the first of them, by alarm, as a checkpoint holds them. An alarm that has stopped the
        run has patience anew when it goes on."""
        due = {alarm.alarm for alarm in self._due}
        bad = {name: count for name, count in self._bad.items() if count and name not in due}
        return {"bad": bad, "since": {name: self._since[name] for name in bad}}

    def load_state_dict(self, state: dict[str, dict[str, int]]) -> None:
        """Continue from a saved state, after `recall`."""
        self._bad, self._since = (
            {name: number for name, number in state[part].items() if name in self._limits} for part in ("bad", "since")
        )

    def recall(self, folder: Path, done: int) -> None:
        """Remember the numbers of a run's folder up to a step, which rank 0 reads. Collective."""
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
        return any(alarm.action == "stop" for alarm in self._due)

    def act(self, saved: str) -> None:
        """Do what the alarms of the newest step ask for; `saved` says what there is to go on from. Raises RunStopped or
        RollBack, on all ranks alike."""
        for alarm in self._due:
            if alarm.action == "stop":
                raise RunStopped(
                    f"alarm {alarm.message}: the run is stopped, no model was exported, and {saved}: change what is"
                    " wrong and go on with --run.resume auto, or give an earlier checkpoint as run.resume"
                )
        if self._due:
            raise RollBack(f"alarm {self._due[0].message}", min(alarm.since for alarm in self._due))

    def _needs(self, name: str, value: float | None) -> bool:
        return value is not None and (name in self._config.numbers or self._symptoms.needs(name))

    def _seen(self, step: int, values: dict[str, float]) -> dict[str, Sign]:
        signs = {name: sign for name, sign in self._symptoms.seen(step, values).items() if name in self._limits}
        own = {
            name: Sign(values[name], f"{name} is {values[name]:g}") for name in self._config.numbers if name in values
        }
        return {**signs, **own}

    def _bad_signs(self, signs: dict[str, Sign]) -> set[str]:
        """The alarms whose number is bad, but for those that follow from others."""
        bad = {name for name, sign in signs.items() if _is_bad(self._limits[name], sign.value)}
        return {name for name in bad if not _CAUSES.get(name, set()) & bad}

    def _words(self, name: str, sign: Sign) -> str:
        limit, count = self._limits[name], self._bad[name]
        bound = f"above {limit.above:g}" if limit.above is not None and sign.value > limit.above else ""
        bound = bound or f"below {limit.below:g}"
        what = "evaluations" if name == "held_out" else "steps"
        many = "" if limit.patience == 1 else f" for {count} {what}"
        setting = f"alarms.numbers {name}" if name in self._config.numbers else f"alarms.{name}"
        return f"{name}: {sign.words} ({sign.value:.4g}, {bound}{many}; {setting})"

    def _add_numbers(self, values: dict[str, float], signs: dict[str, Sign]) -> None:
        """Add the alarms that are also numbers, and the gap to the held-out reward."""
        if "parity/logp_abs_diff_mean" in values and "parity" in self._limits:
            gap, limit = values["parity/logp_abs_diff_mean"], self._limits["parity"]
            # A gap that is NaN is an alarm too.
            values["parity/alarm"] = float(gap != gap or _is_bad(limit, gap))
        sets = [
            name.removesuffix("/accuracy") for name in values if name.startswith("eval/") and name.endswith("/accuracy")
        ]
        if not sets:
            return
        self._first_set = self._first_set or sets[0]
        if "reward/mean" in values and f"{self._first_set}/reward_mean" in values:
            values["health/heldout_gap"] = values["reward/mean"] - values[f"{self._first_set}/reward_mean"]
        if "held_out" in self._limits:
            sign = signs.get("held_out")
            values["health/alarm"] = float(sign is not None and _is_bad(self._limits["held_out"], sign.value))


def _is_bad(limit: AlarmConfig, value: float) -> bool:
    above = limit.above is not None and value > limit.above
    return above or (limit.below is not None and value < limit.below)
