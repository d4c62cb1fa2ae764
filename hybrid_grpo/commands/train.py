"""`train`: a GRPO run, built in the order in which mistakes are cheapest to find."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hybrid_grpo.checks import check_train
from hybrid_grpo.config import TrainConfig
from hybrid_grpo.parsing import parse


def run(arguments: list[str]) -> None:
    """Parse, build and train."""
    parsed = parse(TrainConfig, arguments, "train")
    config = parsed.config
    plan = check_train(config, int(os.environ.get("WORLD_SIZE", "1")))

    # The settings are sound: now the imports that take seconds.
    from hybrid_grpo import engine
    from hybrid_grpo.policy import Policy
    from hybrid_grpo.reference import Reference
    from hybrid_grpo.run import Run
    from hybrid_grpo.task import Task
    from hybrid_grpo.trainer import Trainer

    device = engine.start()
    task = Task.read(config)
    this = Run(parsed, {"batch": str(plan), **task.facts})
    policy = Policy(
        config.policy,
        config.engine,
        task.tokenizer,
        total_steps=config.run.steps * plan.num_iterations * plan.num_minibatches,
        decoder=config.rollout.decoder,
    )
    this.write_engine_config(policy.deepspeed_config)
    reference = Reference(config.policy) if config.grpo.beta else None
    Trainer(config, plan, policy, reference, task, device).run(this)
    this.say(summary(this.folder, config.eval.name))


def summary(folder: Path, eval_name: str) -> str:
    """What a finished run achieved, in a few lines, from its metrics."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracies = [row[name] for row in rows if (name := f"eval/{eval_name}/accuracy") in row]
    steps = [row for row in rows if "time/step_s" in row]
    seconds = sum(row["time/step_s"] for row in steps)
    lines = {"model": folder / "model", "report": folder / "report.html", "metrics": folder / "metrics.jsonl"}
    facts = {
        f"greedy accuracy on {eval_name}": f"{accuracies[0]:.3f} -> {accuracies[-1]:.3f}" if accuracies else "",
        "completions": f"{steps[-1]['progress/completions']:,.0f} in {seconds:.1f} s of training" if steps else "",
        "generated tokens a second": _median(steps, "throughput/generated_tokens_per_s"),
        "trained tokens a second": _median(steps, "throughput/trained_tokens_per_s"),
        **{name: str(path) for name, path in lines.items()},
    }
    width = max(map(len, facts))
    return "\n".join(["", *(f"  {name:{width}}  {fact}" for name, fact in facts.items() if fact), ""])


def _median(rows: list[dict[str, float]], name: str) -> str:
    values = sorted(row[name] for row in rows if name in row)
    return f"{values[len(values) // 2]:,.0f} (median step)" if values else ""
