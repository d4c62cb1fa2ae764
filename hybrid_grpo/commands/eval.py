"""`eval`: measures a model on the held-out sets, with confidence intervals, or compares two on the same prompts.

Every rank holds the whole model, without an engine. Given the config.yaml of a run, the command measures the model that
the run trained, unless `--policy.model` names another.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hybrid_grpo.commands.arguments import is_run, trained_model
from hybrid_grpo.commands.configs import EvaluateConfig
from hybrid_grpo.config.checks import check_held_out, check_output, check_policy
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.parsing import leading_argument, parse
from hybrid_grpo.config.sources import check_source
from hybrid_grpo.records.console import make_console, make_table
from hybrid_grpo.records.files import json_lines

if TYPE_CHECKING:
    from hybrid_grpo.records.metrics.statistics import Comparison, Floats

COMMAND = "eval [RUN]"


@dataclass(frozen=True)
class Measured:
    model: str
    values: dict[str, float]
    """The numbers by metric name."""
    by_prompt: dict[str, dict[int, float]] = field(default_factory=dict)
    """Numbers of single prompts, by metric and then by the prompt's row in its source."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    """Completions, prompt by prompt."""


def run(arguments: list[str]) -> None:
    """Measure the model. Prints a table on standard error, and one JSON object on standard output: the model, its
    numbers and their intervals; with `eval.against` also those of the other model, and the differences."""
    name, options = leading_argument(arguments, f"{COMMAND} [options]", optional=True)
    why = f"is not the folder of a run: give a model as --policy.model {name}: usage: hybrid-grpo {COMMAND} [options]"
    refuse(bool(name) and not is_run(name), f"{name} {why}")
    recipe = ["--config", f"{name}/config.yaml"] if name else []
    config = parse(EvaluateConfig, with_trained_models([*recipe, *options]), COMMAND).config
    _check(config)
    other = _model_of(config.eval.against) if config.eval.against else None
    found = [measure(config)]
    if other is not None:
        found.append(measure(replace(config, policy=replace(config.policy, model=other))))
    if os.environ.get("RANK", "0") != "0":
        return
    if config.eval.output is not None:
        with json_lines(config.eval.output, "eval.output") as write:
            for measured in found:
                for line in measured.lines:
                    write({"model": measured.model, **line})
    one, *others = found
    # Outside a terminal, lines need not be short.
    said, console = _facts(one), make_console(stderr=True, width=None if sys.stderr.isatty() else 160)
    console.print(_table(one, said["intervals"]))
    for against in others:
        compared = _compared(one, against)
        said["against"] = _facts(against)
        said["differences"] = {
            name: {"difference": c.difference, "interval": _plain(c.low, c.high), "p": c.p, "prompts": c.prompts}
            for name, c in compared.items()
        }
        console.print(_comparison_table(one, against, compared))
    print(json.dumps(said))


def _check(config: EvaluateConfig) -> None:
    check_policy(config.policy)
    sets = check_held_out(config)
    refuse(
        not sets,
        "data.eval_path and data.eval_split are not set, and eval.sets is empty: name the prompts to evaluate on",
    )
    data = config.data
    if data.eval_path is not None:
        check_source("data.eval_path", data.eval_path)
    elif data.eval_split is not None and (data.path != "" or data.task is None):
        check_source("data.path", data.path)
    for held_out in sets if config.eval.output is not None else ():
        path = data.eval_path if held_out.rows is None else held_out.rows.path
        check_output("eval.output", str(config.eval.output), f"the prompts of {held_out.name}", path)


def evaluate(config: EvaluateConfig) -> dict[str, float]:
    """Return the numbers of the evaluation by metric name; they are the same on every rank. Raises UserError."""
    _check(config)
    return measure(config).values


def measure(config: EvaluateConfig) -> Measured:
    """Complete and score the held-out sets with `policy.model`; only rank 0 has numbers of prompts. Collective."""
    from hybrid_grpo import engine
    from hybrid_grpo.data.pictures import sight_of
    from hybrid_grpo.distributed.ranks import gather_objects, rank
    from hybrid_grpo.generation import Callbacks
    from hybrid_grpo.generation.rollout import attention_of, complete
    from hybrid_grpo.model.loading import load_model
    from hybrid_grpo.model.reading import Reading
    from hybrid_grpo.records.metrics.meter import Meter
    from hybrid_grpo.run.inputs import read_eval_inputs

    device = engine.start()
    if rank() == 0:
        print(f"model: {config.policy.model}", file=sys.stderr, flush=True)
    inputs = read_eval_inputs(config)
    warnings = {inputs.sampler.warning(held_out.prompts, held_out.settings.data) for held_out in inputs.eval_sets}
    if rank() == 0 and any(warnings):
        print(max(warnings), file=sys.stderr, flush=True)
    inputs.load_models(engine.OffloadedModel)
    model = load_model(config.policy, attention_of(config.rollout.decoder)).to(device).eval()
    reading = Reading(sight_of(inputs.sampler.album, config.policy, device))
    meter = Meter(device)
    measured = Measured(config.policy.model, {})
    for held_out in inputs.eval_sets:
        rollout = held_out.settings.rollout
        prompts = held_out.own_prompts()
        requests, sampling = held_out.requests(prompts), held_out.sampling
        callbacks = Callbacks(turns=inputs.partners, reading=reading)
        groups, _ = complete(model, inputs.tokenizer, requests, sampling, rollout, callbacks)
        results = held_out.results(prompts, groups)
        meter.update(results.numbers())
        ids = [prompt.id for prompt in prompts]
        for rank_ids, by_prompt, lines in gather_objects((ids, results.by_prompt(), results.lines())) or ():
            for name, value_P in by_prompt.items():
                of_set = measured.by_prompt.setdefault(f"eval/{held_out.name}/{name}", {})
                of_set.update(zip(rank_ids, value_P.tolist(), strict=True))
            measured.lines.extend(lines)
    measured.values.update(meter.reduce())
    return measured


def _model_of(name: str) -> str:
    """Return the model to compare with: if `name` is a run's folder or config.yaml, the model that the run trained, or
    else `name` itself. Raises UserError if that model does not exist."""
    from hybrid_grpo.model.loading import load_config

    folder = Path(name).parent if Path(name).name == "config.yaml" else Path(name)
    model = trained_model(folder, f"eval.against {name}") if (folder / "metrics.jsonl").is_file() else name
    load_config(model, "eval.against")
    return model


def _facts(measured: Measured) -> dict[str, Any]:
    """Return the model and its numbers, and 95 % intervals of those that are means over prompts; None for one that no
    prompt has."""
    from hybrid_grpo.records.metrics.statistics import interval, share_interval

    bounds: dict[str, list[float] | None] = {}
    for name, of_prompts in measured.by_prompt.items():
        values = [value for value in of_prompts.values() if not math.isnan(value)]
        of_mean = interval if name.endswith("/reward_mean") else share_interval
        bounds[name] = _plain(*of_mean(values)) if values else None
    return {"model": measured.model, **measured.values, "intervals": bounds}


def _compared(one: Measured, other: Measured) -> dict[str, Comparison]:
    """Compare two models on the prompts that both have; if their tokenizers differ, one may have dropped prompts."""
    import numpy as np

    from hybrid_grpo.records.metrics.statistics import compare

    def values(of_prompts: dict[int, float], ids: list[int]) -> Floats:
        return np.array([of_prompts[i] for i in ids])

    compared = {}
    for name, of_prompts in one.by_prompt.items():
        theirs = other.by_prompt[name]
        both = [i for i, value in of_prompts.items() if not math.isnan(value + theirs.get(i, math.nan))]
        if both:
            compared[name] = compare(values(of_prompts, both), values(theirs, both))
    return compared


def _plain(low: float, high: float) -> list[float] | None:
    """Return the bounds of an interval as a list for JSON; None if they are NaN."""
    return None if math.isnan(low) else [low, high]


def _table(measured: Measured, intervals: dict[str, list[float] | None]) -> Table:
    table = make_table("number", ["mean over prompts", "95 % interval", "standard error", "prompts"])
    for name, of_prompts in measured.by_prompt.items():
        stage, _, number = name.rpartition("/")
        error = measured.values.get(f"{stage}/stderr") if number == "accuracy" else None
        mean = measured.values.get(name)  # None if a reward failed on every completion
        counted = sum(not math.isnan(value) for value in of_prompts.values())
        interval = _bounds(intervals[name])
        table.add_row(name.removeprefix("eval/"), _shown(mean), interval, _shown(error), f"{counted:,}")
    for name, value in measured.values.items():
        if name.endswith(("/clipped_frac", "/failed_frac")) and value:
            table.add_row(name.removeprefix("eval/"), f"{value:.3f}")
    return table


def _comparison_table(one: Measured, other: Measured, compared: dict[str, Comparison]) -> Table:
    table = make_table("number", ["model", "against", "difference", "95 % interval", "p", "prompts"])
    for name, c in compared.items():
        mine, theirs = (f"{measured.values[name]:.3f}" for measured in (one, other))
        gap, interval = f"{c.difference:+.3f}", _bounds(_plain(c.low, c.high))
        table.add_row(name.removeprefix("eval/"), mine, theirs, gap, interval, f"{c.p:.4f}", f"{c.prompts:,}")
    return table


def _shown(number: float | None) -> str:
    return "" if number is None else f"{number:.3f}"


def _bounds(interval: list[float] | None) -> str:
    return f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else ""


def with_trained_models(arguments: list[str]) -> list[str]:
    """Return the arguments, with a run's trained model as `--policy.model` added after the run's config.yaml.

    Later settings override earlier ones. If the arguments name a model themselves, nothing is added.
    """
    if any(argument.partition("=")[0] == "--policy.model" for argument in arguments):
        return arguments
    added: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        added.append(argument)
        if before == "--config" or argument.startswith("--config="):
            recipe = Path(argument.removeprefix("--config="))
            model = recipe.parent / "model"
            is_run = recipe.name == "config.yaml" and (recipe.parent / "metrics.jsonl").is_file()
            if is_run and (model / "config.json").is_file():
                added.append(f"--policy.model={model}")
            elif is_run and os.environ.get("RANK", "0") == "0":
                print(f"{recipe.parent} has no trained model: its starting model is measured", file=sys.stderr)
    return added
