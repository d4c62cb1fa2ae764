"""GRPO from Python: a model's folder, rows and a function in; the run and its metrics out.

    python examples/from_python.py

Under the deepspeed launcher the same script runs on every rank:

    deepspeed --num_accelerators 2 --no_local_rank examples/from_python.py
"""

import random
import string

import hybrid_grpo as hg

MODEL = "runs/letters-task/model"


def vowels(completions: list[str], **columns: object) -> list[float]:
    """The share of the five vowels that a completion has, each counted once."""
    return [len(set(text) & set("aeiou")) / 5 for text in completions]


def main() -> None:
    draw = random.Random(0)
    rows = [{"prompt": "".join(draw.sample(string.ascii_lowercase, 4)) + "="} for _ in range(64)]
    run = hg.train(
        model=MODEL,
        data=rows,
        rewards=[vowels],
        run={"steps": 60},
        policy={"dtype": "float32", "lr": 3e-3},
        rollout={"prompts_per_step": 16, "max_completion_tokens": 8},
        log={"wandb": "disabled"},
    )
    print(run.metrics[["step", "reward/mean", "completion/length_mean"]].to_string(index=False))
    for row in hg.generate(model=run.model, data=["dcab=", "zyxw="], rollout={"max_completion_tokens": 8}):
        print(row["prompt"], row["completion"])


if __name__ == "__main__":
    main()
