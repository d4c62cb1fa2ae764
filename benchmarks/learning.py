"""Learning curves on letters and sums: our Trainer beside TRL's GRPOTrainer, from the same weights.

    python benchmarks/learning.py --workload ragged --seeds 0,1,2 --grpo.num_iterations 2 --json FILE

`ragged` has words of 3 to 24 letters, of log-normal lengths; `letters` of 3 to 6; `real` is the quickstart:
SmolLM2-135M-Instruct and sums; `products`, `letter_counting` and `gsm_symbolic` are other problems for this model.

A seed determines the task and the weights after the supervised warm-up, and is the seed of both trainers. Both get the
prompts in the same order and the recipe's settings: group size, limits, AdamW, gradient norm, clipping, loss, scaling
of rewards, and the learning rate of every optimizer step. Further options are passed to all sides as settings of
`train`. The sides take turns of --every steps.

Reward is the mean of each step's completions; accuracy is that of greedy completions of the held-out words, by the same
decoder (ours) from the weights that each side writes. Seconds are those of the steps, without evaluation and start.

Side `settings` is ours with additional settings, for features that the other side lacks. With the same reward, letter
by letter:

    python benchmarks/learning.py --sides hybrid,settings,trl --settings \\
        '--rewards "[{function: exact_match}, {function: letters_in_place, kwargs: {steps: true}}]"'
"""

import argparse
import os
import shlex
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from machine import chosen, parser_of, save
from step import SIDES, Worker, measured_on, set_accelerator, trl_environment
from step_workloads import REAL, letters, real

from hybrid_grpo.config import PolicyConfig, TrainConfig
from hybrid_grpo.config.parsing import parse
from hybrid_grpo.generation.rollout import attention_of, complete
from hybrid_grpo.model.loading import load_model
from hybrid_grpo.policy import learning_rate
from hybrid_grpo.run.inputs import RunInputs

LEARNED = {"letters": letters, "ragged": partial(letters, ragged=True), "real": real}
LEARNED |= {problems: partial(real, problems=problems) for problems in REAL}
NAMES = ("hybrid", "trl", "settings")


class Evaluation:
    """Greedy accuracy on the held-out prompts of a configuration."""

    def __init__(self, arguments: list[str]) -> None:
        self.config = parse(TrainConfig, arguments, "train").config
        self.task = RunInputs.read(self.config)

    def accuracy(self, weights: Path | str) -> float:
        """Greedy accuracy of the model in a folder."""
        rollout, task, held_out = self.config.rollout, self.task, self.task.eval_sets[0]
        model = load_model(replace(self.config.policy, model=str(weights)), attention_of(rollout.decoder)).eval()
        requests = held_out.requests(held_out.prompts)
        groups, _ = complete(model, task.tokenizer, requests, held_out.sampling, rollout)
        return float(held_out.results(held_out.prompts, groups).right_PG.double().mean())


def learning_rates(config: dict[str, Any]) -> list[float]:
    """Of every optimizer step of a run."""
    updates = config["run"]["steps"] * config["grpo"]["num_iterations"] * config["grpo"]["num_minibatches"]
    return [learning_rate(PolicyConfig(**config["policy"]), update, updates) for update in range(updates)]


def curves(seed: int, arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Both sides' curves for a seed."""
    job = LEARNED[arguments.workload](folder, seed)
    settings = ["--run.steps", str(arguments.steps), *arguments.common]
    spec = job.spec(0, arguments.threads, settings)
    changed = job.spec(0, arguments.threads, [*settings, *arguments.settings])
    rates = learning_rates(spec["config"])
    rollout = spec["config"]["rollout"]
    rows = rollout["prompts_per_step"] * rollout["num_generations"]
    evaluation = Evaluation(spec["arguments"])
    start = {"completions": 0, "seconds": 0.0, "accuracy": evaluation.accuracy(spec["config"]["policy"]["model"])}
    found: dict[str, dict[str, Any]] = {side: {"steps": [], "evaluations": [start]} for side in arguments.sides}
    with ExitStack() as stack:
        specs = {"settings": (SIDES["hybrid"], {**changed, "learning_rates": rates})}
        specs |= {side: (SIDES[side], {**spec, "learning_rates": rates}) for side in ("hybrid", "trl")}
        python = arguments.trl_python
        workers = [stack.enter_context(Worker(side, *specs[side], python, folder)) for side in arguments.sides]
        for worker in workers:
            worker.answer()
        for done in range(0, arguments.steps, arguments.every):
            for worker in workers:
                steps, evaluations = found[worker.name]["steps"], found[worker.name]["evaluations"]
                for k in range(done, min(done + arguments.every, arguments.steps)):
                    result = worker.step()
                    seconds = result["seconds"] + (steps[-1]["seconds"] if steps else 0.0)
                    steps.append({"completions": (k + 1) * rows, "seconds": seconds, "reward": result["reward"]})
                weights = folder / f"{worker.name}-weights"
                worker.ask(save=str(weights))
                here = {name: steps[-1][name] for name in ("completions", "seconds")}
                evaluations.append({**here, "accuracy": evaluation.accuracy(weights)})
                print(f"seed {seed} {worker.name:8} {show(evaluations[-1])}", flush=True)
    return found


def sooner(side: str, sides: dict[str, dict[str, Any]]) -> str:
    """How long a side of ours took to reach TRL's final accuracy."""
    goal = sides["trl"]["evaluations"][-1]
    reached = next((p["seconds"] for p in sides[side]["evaluations"] if p["accuracy"] >= goal["accuracy"]), None)
    return f"{side} reaches TRL's {goal['accuracy']:.3f} after {reached} s, TRL after {goal['seconds']:.1f} s"


def show(point: dict[str, float]) -> str:
    """One evaluation in a line."""
    return f"{point['completions']:8,d} completions {point['seconds']:8.1f} s  accuracy {point['accuracy']:.3f}"


def draw(found: dict[str, dict[str, Any]], file: Path) -> None:
    """Draw the accuracy of every side over completions and over seconds."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.fonttype"] = "none"
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3), sharey=True, layout="constrained")
    for sides in found.values():
        for curve, color in zip(sides.values(), ("C0", "C1", "C2"), strict=False):
            accuracy = [point["accuracy"] for point in curve["evaluations"]]
            for axis, of in zip(axes, ("completions", "seconds"), strict=True):
                axis.plot([point[of] for point in curve["evaluations"]], accuracy, "o-", color=color)
                axis.set(xlabel=of)
    axes[0].set(ylabel="held-out accuracy")
    axes[0].legend(list(sides))
    figure.savefig(file)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workload", choices=LEARNED, default="ragged")
    parser.add_argument("--sides", default="hybrid,trl", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--settings", default="", help="command line of side settings, beyond that of all")
    parser.add_argument("--seeds", default="0,1,2", help="separated by commas")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--every", type=int, default=25, help="steps between evaluations")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of every side")
    parser.add_argument("--trl-python", type=Path, help="see step.py")
    parser.add_argument("--picture", type=Path, help="an svg of the curves")
    arguments, arguments.common = parser.parse_known_args()
    set_accelerator()
    arguments.sides = chosen(parser, "sides", arguments.sides, NAMES)
    arguments.settings = shlex.split(arguments.settings)
    if "trl" in arguments.sides:
        arguments.trl_python = arguments.trl_python or trl_environment()
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for seed in map(int, arguments.seeds.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            found[str(seed)] = curves(seed, arguments, Path(folder))
    for side in arguments.sides:
        ends = [seed[side]["evaluations"][-1] for seed in found.values()]
        accuracies = ", ".join(f"{end['accuracy']:.3f}" for end in ends)
        print(f"{side:8} accuracy {accuracies} after {mean(end['seconds'] for end in ends):.1f} s on average")
    for seed, sides in found.items():
        for side in sides if "trl" in sides else ():
            if side != "trl":
                print(f"seed {seed}: {sooner(side, sides)}")
    if arguments.picture:
        draw(found, arguments.picture)
    result = {name: getattr(arguments, name) for name in ("workload", "common", "settings")}
    save(arguments.json, {**result, "machine": measured_on(arguments.threads, arguments.trl_python), "seeds": found})


if __name__ == "__main__":
    main()
