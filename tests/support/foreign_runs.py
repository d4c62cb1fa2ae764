"""Training with an environment of another package, from the command: a random model that ends its turns early."""

import json

import forks
from paths import ROOT


def train(folder, environment, *more):
    """The completions of the second step, and the metrics of both; raises where a step was not right."""
    assert forks.run(ROOT / "training_scripts/lookup_task.py", folder).status == 0
    vocabulary = json.loads((folder / "model/tokenizer.json").read_text())["added_tokens"]
    [ends] = [piece["id"] for piece in vocabulary if piece["content"] == "<|im_end|>"]
    done = forks.run(
        *("-m", "hybrid_grpo", "train", "--config", ROOT / "training_scripts/lookup.yaml", "--run.dir", folder),
        *("--run.steps", "2", "--policy.model", folder / "model", "--data.path", folder / "train.jsonl"),
        *("--rollout.prompts_per_step", "2", "--rollout.num_generations", "4", "--rollout.tools", "[]"),
        *("--rollout.logit_bias", json.dumps({str(ends): 3.0}), "--rollout.environment", environment),
        *("--engine.zero_stage", "0", "--engine.adam", "torch", "--eval.every", "0", "--log.wandb", "disabled"),
        *("--rewards", "[]", *more),
        cwd=folder,
    )
    assert done.status == 0, done.out + done.err
    metrics = [json.loads(line) for line in (folder / "lookup/metrics.jsonl").read_text().splitlines()]
    for step in metrics:
        assert (step["environment/resets"], step["environment/failed_frac"]) == (8, 0)
        assert step["policy/grad_norm"] > 0
    lines = (folder / "lookup/rollouts/step_000002.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
