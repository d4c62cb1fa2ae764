"""`eval`: greedy accuracy and mean reward on the held-out prompts. No engine: every rank holds the whole model."""

from __future__ import annotations

import json
import os

from hybrid_grpo.config import TrainConfig
from hybrid_grpo.config.checks import check_train
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.parsing import parse


def run(arguments: list[str]) -> None:
    """Parse, load, complete and score; print one JSON object."""
    config = parse(TrainConfig, arguments, "eval").config
    check_train(config, int(os.environ.get("WORLD_SIZE", "1")))
    if config.data.eval_path is None and config.data.eval_split is None:
        raise UserError("data.eval_path and data.eval_split are not set: name the prompts to evaluate on")

    # The settings are sound: now the imports that take seconds.
    from hybrid_grpo import engine
    from hybrid_grpo.data.loader import rank_share
    from hybrid_grpo.distributed import rank, world_size
    from hybrid_grpo.generation import Request
    from hybrid_grpo.generation.rollout import attention_of, complete, sampling_of
    from hybrid_grpo.model.loading import load_model
    from hybrid_grpo.run.inputs import RunInputs
    from hybrid_grpo.run.measure import measure_eval
    from hybrid_grpo.run.metrics import Meter

    device = engine.start()
    task = RunInputs.read(config)
    task.rewards.load_models(engine.Frozen.of)
    model = load_model(config.policy, attention_of(config.rollout.decoder)).to(device).eval()
    prompts = rank_share(task.eval_prompts, rank(), world_size())
    requests = [Request(prompt.token_ids, [0]) for prompt in prompts]
    sampling = sampling_of(config.rollout, task.stop_ids, greedy=True)
    groups, _ = complete(model, task.tokenizer, requests, sampling, config.rollout)
    completions = [group[0] for group in groups]
    meter = Meter(task.rewards.names, [config.eval.name], device)
    scores = task.rewards.score(prompts, completions)
    meter.update(measure_eval(config.eval, task.outcome, completions, scores))
    values = meter.reduce()
    if rank() == 0:
        print(json.dumps(values))
