"""Programs of tests/run/test_guests.py: steps with guests, on one rank and on two; see rank_programs.py."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rank_programs import made, main, restore, save

import hybrid_grpo as hg
from hybrid_grpo.config import BatchPlan, TrainConfig
from hybrid_grpo.config.checks import batch_plan
from hybrid_grpo.features.guests.settings import GuestsConfig
from hybrid_grpo.policy import Policy
from hybrid_grpo.run.feature import Feature, Features, make_features
from hybrid_grpo.run.inputs import RunInputs
from hybrid_grpo.trainer import Trainer


def build(folder: Path) -> Trainer:
    """A run on the tiny model of the letters. A model has written one of the five completions of a group, and a
    file two others, of every second prompt. There is a KL, a correction of the sampler, and two optimizer steps."""
    answers = {"path": str(folder / "answers.jsonl")}
    return made(
        folder, run={"steps": 10}, policy={"micro_batch_tokens": 160}, engine={"zero_stage": 3}, data={"limit": 100},
        rollout={"prompts_per_step": 8, "num_generations": 5, "max_completion_tokens": 12},
        grpo={"beta": 0.1, "sampler_correction": "truncate", "num_minibatches": 2},
        guests={
            "writers": [
                {"name": "large", "weight": "importance", "model": str(folder / "large")},
                {"name": "seeds", "weight": "baseline", **answers},
                {"name": "answers", "weight": "imitation", **answers},
            ]
        },
    )  # fmt: skip


def guests_of(config: TrainConfig, plan: BatchPlan, inputs: RunInputs, policy: Policy) -> list[Feature]:
    """The features of the run, which are its guests, loaded."""
    features = make_features(config, plan, inputs)
    for feature in features:
        feature.load(policy)
    return features


def step(trainer: Trainer, number: int) -> dict[str, Any]:
    """The rows of a step, and its numbers but for those of time and memory."""
    trainer.step(number)
    assert trainer.last_rollout is not None
    rollout, scores, advantages_B = trainer.last_rollout
    rows = zip(rollout.row_prompts, rollout.completions, scores.reward_B.tolist(), advantages_B.tolist(), strict=True)
    metrics = trainer.meter.reduce()
    return {
        "rows": [(p.id, c.writer, c.token_ids, reward, advantage) for p, c, reward, advantage in rows],
        "metrics": {k: v for k, v in metrics.items() if not k.startswith(("time/", "throughput/", "memory/"))},
    }


def two(folder: Path) -> dict[str, Any]:
    """Two steps; and the second again from a checkpoint, with guests that are new."""
    trainer = build(folder)
    seen = {"steps": [step(trainer, 1)]}
    save(trainer, folder, "one")
    seen["steps"].append(step(trainer, 2))
    restore(trainer, folder, "one")
    guests = guests_of(trainer.config, trainer.plan, RunInputs.read(trainer.config), trainer.policy)
    trainer.features = Features(guests, trainer.meter)
    return {**seen, "resumed": step(trainer, 2)}


def one(folder: Path) -> dict[str, Any]:
    """The completions of a policy without guests; the same steps on one rank; and a run by the command."""
    trainer = build(folder)
    config = replace(trainer.config, guests=GuestsConfig())
    alone = Trainer(config, batch_plan(config, 1), trainer.policy, None, RunInputs.read(config), trainer.device)
    rollout = alone.sample(alone.draw_prompts(), 1)
    seen: dict[str, Any] = {"steps": [step(trainer, 1), step(trainer, 2)]}
    seen["alone"] = [(p.id, c.token_ids) for p, c in zip(rollout.row_prompts, rollout.completions, strict=True)]
    prompts = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()[:12]]
    shared = {"policy": {"dtype": "float32"}, "generate": {"token_logp": True}}
    written = hg.generate(folder / "large", prompts, **shared, rollout={"max_completion_tokens": 4})
    (folder / "written.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    (folder / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    right = [{"prompt": row["prompt"], "completion": row["answer"][:2]} for row in prompts]
    (folder / "right.jsonl").write_text("".join(json.dumps(row) + "\n" for row in right))
    run = hg.train(
        model=folder / "model", data=folder / "few.jsonl", rewards=["letters_in_place"],
        run={"dir": str(folder), "name": "run", "steps": 2}, policy={"dtype": "float32"},
        rollout={"prompts_per_step": 4, "num_generations": 4, "max_completion_tokens": 4},
        guests={
            "writers": [
                {"name": "large", "model": str(folder / "large"), "weight": "importance"},
                {"name": "written", "path": str(folder / "written.jsonl"), "weight": "importance"},
                {"name": "answers", "path": str(folder / "right.jsonl"), "weight": "imitation"},
            ]
        },
        log={"wandb": "disabled", "rollouts_every": 1},
    )  # fmt: skip
    seen["metrics"] = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    lines = (run.folder / "rollouts/step_000002.jsonl").read_text().splitlines()
    seen["writers"] = [json.loads(line).get("writer") for line in lines]
    seen["report"] = "Ratio of the policy to guests" in (run.folder / "report.html").read_text()
    return seen


if __name__ == "__main__":
    main(globals())
