"""Programs of test_teacher.py: steps with a teacher, on one rank and on two; see rank_programs.py."""

import json
from pathlib import Path
from typing import Any

import torch
from rank_programs import made, main

import hybrid_grpo as hg
from hybrid_grpo.distributed.ranks import world_size

METRICS = (
    *("policy/loss", "policy/grad_norm", "reward/mean", "completion/length_mean"),
    *("teacher/kl", "teacher/logp", "teacher/loss", "guests/answers/rows"),
)


def steps(folder: Path, stage: int, generations: int, sections: Any = None, **teacher: Any) -> list[dict[str, Any]]:
    """Metrics of two steps with two optimizer steps each, in small micro-batches, and the tokens that were sampled."""
    trainer = made(
        folder, run={"steps": 10}, policy={"micro_batch_tokens": 100}, engine={"zero_stage": stage},
        rollout={"prompts_per_step": 12, "num_generations": generations, "max_completion_tokens": 8},
        grpo={"num_minibatches": 2}, teacher=teacher, rewards=["letters_in_place"],
        **{"data": {"limit": 100}, **(sections or {})},
    )  # fmt: skip
    seen = []
    for step in (1, 2):
        trainer.step(step)
        metrics = trainer.meter.reduce()
        assert trainer.last_rollout is not None
        tokens = [completion.token_ids for completion in trainer.last_rollout[0].completions]
        seen.append({"metrics": {name: metrics[name] for name in METRICS if name in metrics}, "tokens": tokens})
    return seen


def all_ways(folder: Path) -> dict[str, Any]:
    """A teacher in the loss, by its most probable tokens, of which half of the completions are answers from a file; the
    policy itself in the advantages, which reads the answer and completes every prompt once; and two teachers, each for
    a source of prompts. The stage is 3 on two ranks and 0 on one."""
    stage, offload, other = 3 if world_size() > 1 else 0, world_size() > 1, str(folder / "other")
    answers = {"name": "answers", "weight": "distill", "path": str(folder / "answers.jsonl")}
    of_loss = {"into": "loss", "top_k": 4, "coef": 0.5, "divergence": "jsd", "clamp": 2.0}
    mixture = [{"path": str(folder / f"{name}.jsonl"), "limit": 60} for name in ("train", "heldout")]
    by_source = {"train": other, "heldout": str(folder / "model")}
    return {
        "loss": steps(folder, stage, 2, {"guests": {"writers": [answers]}}, model=other, offload=offload, **of_loss),
        "advantage": steps(folder, stage, 1, prompt_column="answer"),
        "sources": steps(folder, stage, 2, {"data": {"path": "", "mixture": mixture}}, by_source=by_source, clamp=5.0),
    }


def one(folder: Path) -> dict[str, Any]:
    """The same on one rank; and a run by the command, with adapters, whose teacher is the model under them."""
    seen = all_ways(folder)
    run = hg.train(
        model=folder / "model", data=str(folder / "train.jsonl"), rewards=["exact_match"],
        run={"dir": str(folder), "name": "run", "steps": 2}, policy={"dtype": "float32", "lr": 1e-2}, lora={"rank": 2},
        rollout={"prompts_per_step": 4, "num_generations": 1, "max_completion_tokens": 4},
        teacher={"model": str(folder / "model"), "into": "loss"}, log={"wandb": "disabled"},
    )  # fmt: skip
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    return {**seen, "run": [json.loads(line) for line in lines]}


def two(folder: Path) -> dict[str, Any]:
    """On two ranks."""
    return all_ways(folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(globals())
