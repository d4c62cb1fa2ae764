"""A bench of learning: all objectives on three tasks, from the same warm-up, with equal samples.

    python benchmarks/objectives.py [--tasks letters,countdown,lookup] [--presets NAMES] [--seeds 0,1,2]
        [--at-once 2] [--json FILE] [--png FILE]
    python benchmarks/objectives.py --trl PYTHON [--tasks letters,countdown] ...

The tasks: `letters` sorts the letters of words, as the quickstart does, and
`words` those of words of 3 to 24 letters; `countdown` combines three digits to a target
(countdown_task.py); `lookup` calls a tool whose result the model cannot know (training_scripts/lookup_task.py). A seed
determines the task, the weights after a supervised warm-up, and the sampling. All presets have the recipe's settings,
its learning rate, and four optimizer steps on each rollout, since most differ in later steps only. Dynamic sampling is
off, since it takes more samples. Accuracy is that of four samples for each held-out prompt.

Every run is one process with one thread, --at-once of them at a time. A result is written to FILE when its run ends,
and runs that FILE has are not made again: the bench can be taken in parts. Warm-ups are kept in --work.

The table has mean and standard error over seeds. Differences of presets are compared with a standard error that is
pooled over all presets of the task: that of a randomized block design, with presets as treatments and seeds as blocks.

With `--trl` it measures the bar instead: TRL's GRPOTrainer with all completions, against hybrid_grpo with half of them
and what TRL lacks. Both sides are searched on the first seed: all their variants at one learning rate, then the best
variant at the other rates, then with two and four passes over each rollout, then at all rates again. PYTHON is that of
an environment created by `bash benchmarks/trl_env.sh FOLDER`.

Only --png needs matplotlib: pip install matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from objectives_runs import EXACT, RIGHT, SOLVED, TASKS, Run, measured, warmed_up
from step import machine, set_accelerator

from hybrid_grpo.config.presets import presets

PRESETS, IN_TABLE = list(presets()), ("letters", "countdown", "lookup")
BASELINE = "grpo"
SEVERAL = ["--grpo.num_minibatches", "4"]
EQUAL = ["--grpo.dynamic_sampling", "false"]
"""Replaced groups would be more samples."""
UNFIT = {("countdown", "gdpo"), ("lookup", "gdpo")}
"""GDPO needs two rewards."""

RATES, PASSES = ("3e-4", "6e-4", "1e-3", "2e-3"), ("1", "2", "4")
"""Learning rates and passes over a rollout that --trl searches; variants are compared at the second and the first."""
TRL = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
}
"""TRL's objectives, by settings of its GRPOConfig."""
STEPS = {"kwargs": {"steps": True}}
BY_TOKEN = {
    **{task: [{**EXACT, **STEPS}, {"function": "letters_in_place", **STEPS}] for task in ("letters", "words")},
    "countdown": [{**SOLVED, **STEPS}],
}
ITS_OWN = ["--grpo.step_discount", "0"]
GUEST = ["--guests.writers", f"[{{name: answers, path: {RIGHT}, weight: imitation}}]"]
CURRICULUM = ["--curriculum.sampling", "difficulty", "--data.shuffle", "true"]
OURS = {
    task: {
        "steps rewarded": ["--rewards", json.dumps(rewards)],
        "steps rewarded, curriculum": ["--rewards", json.dumps(rewards), *CURRICULUM],
        "each step's own reward, curriculum": ["--rewards", json.dumps(rewards), *ITS_OWN, *CURRICULUM],
        "optimal baseline, curriculum": ["--grpo.preset", "otb", *CURRICULUM],
        **({"guest, curriculum": [*GUEST, *CURRICULUM]} if task != "countdown" else {}),
    }
    for task, rewards in BY_TOKEN.items()
}
"""What TRL lacks: rewards of steps, whose sums are the rewards that TRL gets, for all steps before or for each alone, a
curriculum, the optimal token baseline, and a guest with the right answers, where the data have them."""
SIDES = ("TRL", "hybrid_grpo")

Runs = dict[str, dict[str, dict[str, Any]]]
"""Results by task and name: the identity of their runs, and `seeds`, with what `measured` returns for each."""


class Results:
    """The runs that were made, and their file."""

    def __init__(self, file: Path | None, about: dict[str, Any]) -> None:
        self.file, self._lock = file, threading.Lock()
        self.content: dict[str, Any] = {"machine": about, "runs": {}}
        if file is not None and file.exists():
            self.content = json.loads(file.read_text())
            if self.content["machine"] != about:
                sys.exit(f"--json {file} holds results of another machine or other versions: name a new file")

    @property
    def runs(self) -> Runs:
        runs: Runs = self.content["runs"]
        return runs

    def has(self, run: Run) -> bool:
        """Whether this run was made, with these settings."""
        known = self.runs.get(run.task, {}).get(run.name)
        return known is not None and known["identity"] == run.identity and str(run.seed) in known["seeds"]

    def add(self, run: Run, result: dict[str, Any]) -> None:
        """Store a result; those of the same name with other settings are forgotten."""
        with self._lock:
            of_task = self.runs.setdefault(run.task, {})
            if of_task.get(run.name, {}).get("identity") != run.identity:
                of_task[run.name] = {"identity": run.identity, "seeds": {}}
            of_task[run.name]["seeds"][str(run.seed)] = result
            self.write()

    def write(self) -> None:
        """Write the file, if there is one."""
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            part = self.file.with_suffix(".part")
            part.write_text(json.dumps(self.content, indent=1) + "\n")
            part.replace(self.file)

    def of(self, run: Run) -> dict[str, Any]:
        """What `measured` returned for a run."""
        found: dict[str, Any] = self.runs[run.task][run.name]["seeds"][str(run.seed)]
        return found

    def final(self, run: Run) -> float:
        """The accuracy at the end of a run."""
        accuracy: float = self.of(run)["accuracy"][-1]
        return accuracy


def make(runs: list[Run], results: Results, arguments: argparse.Namespace) -> list[Run]:
    """Make the runs that the results lack; returns those that failed."""
    left = [run for run in runs if not results.has(run)]
    failed: list[Run] = []

    def one(run: Run) -> None:
        try:
            found = measured(run, arguments.work / f"{run.task}-{run.seed}", arguments.trl)
        except SystemExit as failure:
            failed.append(run)
            print(f"{run.task} {run.name} seed {run.seed} failed: {str(failure)[-2000:]}", file=sys.stderr, flush=True)
            return
        results.add(run, found)
        shown = ", ".join(f"{value:.3f}" for value in found["accuracy"])
        print(f"{run.task} {run.name} seed {run.seed}: {shown} in {found['wall_s']:.0f} s", flush=True)

    with ThreadPoolExecutor(arguments.at_once) as pool:
        warm = sorted({(run.task, run.seed) for run in left})
        list(pool.map(lambda at: warmed_up(*at, arguments.work), warm))
        list(pool.map(one, left))
    return failed


def compared(finals: dict[str, list[float]]) -> dict[str, Any]:
    """Which presets differ, from the final accuracies of all seeds, in the same order for each.

    Returns for each preset `mean`, `error` (the standard error over seeds), and its differences `from_best` and
    `from_baseline` in accuracy; `difference_error` is the standard error of a difference of two presets.
    """
    seeds = len(next(iter(finals.values())))
    means = {name: mean(values) for name, values in finals.items()}
    by_seed = [mean(values) for values in zip(*finals.values(), strict=True)]
    whole = mean(by_seed)
    squares = [
        (value - means[name] - seed + whole) ** 2
        for name, values in finals.items()
        for value, seed in zip(values, by_seed, strict=True)
    ]
    freedom = (len(finals) - 1) * (seeds - 1)
    best = max(means.values())
    return {
        "difference_error": math.sqrt(2 * sum(squares) / freedom / seeds) if freedom else None,
        "presets": {
            name: {
                "mean": means[name],
                "error": stdev(values) / math.sqrt(seeds) if seeds > 1 else None,
                "from_best": means[name] - best,
                "from_baseline": means[name] - means[BASELINE] if BASELINE in means else None,
            }
            for name, values in finals.items()
        },
    }


def finals(of_task: dict[str, dict[str, Any]], names: list[str], seeds: list[str]) -> dict[str, list[float]]:
    """Final accuracies of the presets of which all seeds were run."""
    known = {name: of_task.get(name, {}).get("seeds", {}) for name in names}
    return {
        name: [runs[seed]["accuracy"][-1] for seed in seeds]
        for name, runs in known.items()
        if all(seed in runs for seed in seeds)
    }


def table(summaries: dict[str, dict[str, Any]]) -> str:
    """Markdown: mean and standard error. Bold: within two standard errors of the best. + and -: not within two standard
    errors of BASELINE."""

    def cell(task: str, name: str) -> str:
        summary = summaries[task]
        if name not in summary["presets"]:
            return "-"
        entry, error = summary["presets"][name], summary["difference_error"]
        if error is None:
            return f"{entry['mean']:.3f}"
        shown = f"{entry['mean']:.3f} ± {entry['error']:.3f}"
        shown = f"**{shown}**" if entry["from_best"] >= -2 * error else shown
        apart = entry["from_baseline"] or 0.0
        return shown + (" +" if apart > 2 * error else " -" if apart < -2 * error else "")

    names = dict.fromkeys(name for summary in summaries.values() for name in summary["presets"])
    lines = ["| preset | " + " | ".join(summaries) + " |", "|---" * (1 + len(summaries)) + "|"]
    lines += [f"| {name} | " + " | ".join(cell(task, name) for task in summaries) + " |" for name in names]
    errors = ["-" if s["difference_error"] is None else f"{s['difference_error']:.3f}" for s in summaries.values()]
    return "\n".join([*lines, f"| *standard error of a difference* | {' | '.join(errors)} |"])


def draw(runs: Runs, summaries: dict[str, dict[str, Any]], file: Path) -> None:
    """For each task: curves with a band of one standard error, and the final accuracies with two."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for summary in summaries.values() for name in summary["presets"]))
    colours = dict(zip(names, plt.get_cmap("turbo")([(k + 0.5) / len(names) for k in range(len(names))]), strict=True))
    figure, axes = plt.subplots(
        len(summaries), 2, figsize=(12, 1 + 4.5 * len(summaries)), squeeze=False, layout="constrained"
    )
    for (curves, ends), (task, summary) in zip(axes, summaries.items(), strict=True):
        for name in summary["presets"]:
            of_seeds = list(runs[task][name]["seeds"].values())
            columns = list(zip(*(seed["accuracy"] for seed in of_seeds), strict=True))
            x, middle = of_seeds[0]["completions"], [mean(values) for values in columns]
            error = [stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0 for values in columns]
            low, high = ([m + sign * e for m, e in zip(middle, error, strict=True)] for sign in (-1, 1))
            curves.plot(x, middle, color=colours[name])
            curves.fill_between(x, low, high, color=colours[name], alpha=0.05, linewidth=0)
        curves.set(title=task, xlabel="completions", ylabel="held-out accuracy of samples")
        order = sorted(summary["presets"], key=lambda name: summary["presets"][name]["mean"])
        for place, name in enumerate(order):
            entry = summary["presets"][name]
            spread = 2 * (entry["error"] or 0.0)
            ends.errorbar(entry["mean"], place, xerr=spread, color=colours[name], marker="o", capsize=3)
        ends.set_yticks(range(len(order)), order)
        ends.set(xlabel="final accuracy, mean and two standard errors")
        for axis in (curves, ends):
            axis.grid(alpha=0.3)
    figure.savefig(file, dpi=80)


def preset_run(task: str, name: str, seed: int) -> Run:
    """A run of the table."""
    return Run(task, name, seed, TASKS[task].steps, ["--grpo.preset", name, *EQUAL, *SEVERAL])


Choice = tuple[str, str, str]
"""A variant, a learning rate, and the number of passes over a rollout."""


def contender(task: str, side: str, choice: Choice, seed: int) -> Run:
    """A run of the bar: TRL with all completions, ours with half of them."""
    variant, rate, passes = choice
    steps = TASKS[task].steps
    shared = ["--rollout.prompts_per_step", "64", "--policy.lr", rate, "--grpo.num_iterations", passes]
    name = f"{side}: {variant}, {rate}, {passes} pass" + "es" * (passes != "1")
    if side == "TRL":
        return Run(task, name, seed, steps, shared, TRL[variant])
    return Run(task, name, seed, steps // 2, [*shared, *OURS[task][variant]])


Do = Callable[[list[Run]], Any]


def searched(task: str, seed: int, losses: list[str], results: Results, do: Do) -> dict[str, Choice]:
    """The best choice of each side on one seed, one axis after the other, and then the rates once more."""
    best: dict[str, Choice] = {side: ("", RATES[1], PASSES[0]) for side in SIDES}
    for axis in (0, 1, 2, 1):
        tried: dict[str, list[Choice]] = {}
        for side, choice in best.items():
            values = (losses if side == "TRL" else list(OURS[task]), RATES, PASSES)[axis]
            tried[side] = [(*choice[:axis], value, *choice[axis + 1 :]) for value in values]  # type: ignore[misc]
        do([contender(task, side, choice, seed) for side in SIDES for choice in tried[side]])

        def final(side: str, choice: Choice) -> float:
            run = contender(task, side, choice, seed)
            return results.final(run) if results.has(run) else -1.0

        best = {side: max(tried[side], key=partial(final, side)) for side in SIDES}
    return best


def beside_trl(tasks: list[str], seeds: list[int], losses: list[str], results: Results, do: Do) -> str:
    """Search both sides on the first seed and run the best of each on all; returns the table."""
    lines = [
        "| task | objective, learning rate, passes | completions | " + " | ".join(f"seed {s}" for s in seeds) + " |"
    ]
    lines.append("|---" * (3 + len(seeds)) + "|")
    for task in tasks:
        best = searched(task, seeds[0], losses, results, do)
        runs = {side: [contender(task, side, choice, seed) for seed in seeds] for side, choice in best.items()}
        do([run for side in SIDES for run in runs[side]])
        for of_side in runs.values():
            made = [run for run in of_side if results.has(run)]
            shown = [f"{results.final(run):.3f}" if run in made else "-" for run in of_side]
            count = max((results.of(run)["completions"][-1] for run in made), default=0)
            lines.append(f"| {task} | {of_side[0].name} | {count:,} | {' | '.join(shown)} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", help="separated by commas")
    parser.add_argument("--presets", default=",".join(PRESETS), help=f"of {', '.join(PRESETS)}")
    parser.add_argument("--seeds", default="0,1,2", help="separated by commas")
    parser.add_argument("--at-once", type=int, default=2, help="runs at the same time")
    parser.add_argument("--trl", type=Path, help="python of an environment with TRL; measures the bar instead")
    parser.add_argument("--losses", default=",".join(TRL), help="those of TRL's that --trl tries")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), "objectives"), help="for warm-ups")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    arguments.tasks = arguments.tasks or ",".join(OURS if arguments.trl else IN_TABLE)
    known = {"tasks": list(OURS if arguments.trl else TASKS), "presets": PRESETS, "losses": list(TRL)}
    for setting, names in known.items():
        given = getattr(arguments, setting).split(",")
        if unknown := set(given).difference(names):
            parser.error(f"--{setting}: {', '.join(sorted(unknown))} not known; there are {', '.join(names)}")
        setattr(arguments, setting, given)
    arguments.seeds = list(map(int, arguments.seeds.split(",")))
    return arguments


def main() -> None:
    arguments = parse()
    set_accelerator()
    arguments.work.mkdir(parents=True, exist_ok=True)
    results = Results(arguments.json, machine(1, None))
    failed: list[Run] = []

    def do(runs: list[Run]) -> list[Run]:
        failed.extend(make(runs, results, arguments))
        return failed

    if arguments.trl:
        print(beside_trl(arguments.tasks, arguments.seeds, arguments.losses, results, do))
    else:
        # Seed after seed, so that a part of the bench has all presets.
        do([
            preset_run(task, name, seed)
            for seed in arguments.seeds
            for task in arguments.tasks
            for name in arguments.presets
            if (task, name) not in UNFIT
        ])  # fmt: skip
        seeds = list(map(str, arguments.seeds))
        ends = {task: finals(results.runs.get(task, {}), arguments.presets, seeds) for task in arguments.tasks}
        summaries = {task: compared(of_task) for task, of_task in ends.items() if of_task}
        results.content["tables"] = {**results.content.get("tables", {}), **summaries}
        results.write()
        print(table(summaries))
        if arguments.png:
            draw(results.runs, summaries, arguments.png)
    if failed:
        sys.exit(f"{len(failed)} runs failed")


if __name__ == "__main__":
    main()
