"""`eval`: greedy accuracy and mean reward on the held-out prompts. No engine: every rank holds the whole model.

With the config.yaml of a run it measures the model that the run trained, unless `--policy.model` names another.
"""

import json
import os
import sys
from pathlib import Path

from hybrid_grpo.config import TrainConfig
from hybrid_grpo.config.checks import check_train
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.held_out import held_out_sets
from hybrid_grpo.config.parsing import parse


def run(arguments: list[str]) -> None:
    """Parse, load, complete and score; print one JSON object with the model that was measured and its numbers."""
    config = parse(TrainConfig, with_trained_models(arguments), "eval").config
    values = evaluate(config)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"model": config.policy.model, **values}))


def evaluate(config: TrainConfig) -> dict[str, float]:
    """The numbers of the evaluation by name, the same on every rank. Raises UserError."""
    check_train(config, int(os.environ.get("WORLD_SIZE", "1")))
    if not held_out_sets(config):
        raise UserError(
            "data.eval_path and data.eval_split are not set, and eval.sets is empty: name the prompts to evaluate on"
        )

    from hybrid_grpo import engine
    from hybrid_grpo.distributed import rank
    from hybrid_grpo.generation.rollout import attention_of, complete
    from hybrid_grpo.model.loading import load_model
    from hybrid_grpo.run.inputs import RunInputs

    device = engine.start()
    if rank() == 0:
        print(f"model: {config.policy.model}", file=sys.stderr, flush=True)
    inputs = RunInputs.read(config)
    inputs.load_models(engine.Frozen)
    model = load_model(config.policy, attention_of(config.rollout.decoder)).to(device).eval()
    meter = inputs.meter(device)
    for held_out in inputs.eval_sets:
        rollout = held_out.settings.rollout
        groups, _ = complete(model, inputs.tokenizer, held_out.requests, held_out.sampling, rollout)
        meter.update(held_out.results(groups).numbers())
    return meter.reduce()


def with_trained_models(arguments: list[str]) -> list[str]:
    """The arguments, with the trained model as `--policy.model` behind every config.yaml of a run that has one.

    Later settings win, and where the arguments name a model themselves nothing is added.
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
