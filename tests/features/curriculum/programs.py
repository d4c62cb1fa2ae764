"""The program of test_curriculum.py that needs an engine: `python programs.py NAME FOLDER`, as rank_programs.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rank_programs import build, main

from hybrid_grpo.config import GrpoConfig
from hybrid_grpo.features.curriculum.settings import CurriculumConfig
from hybrid_grpo.trainer import Trainer

CURRICULUM = CurriculumConfig(sampling="difficulty", skip_below=0.1)


def curriculum(folder: Path) -> dict[str, Any]:
    """Four steps that follow the success rates, with minibatches and dynamic sampling; the last two again, resumed."""
    first = build(folder)
    config = replace(
        first.config,
        curriculum=CURRICULUM,
        grpo=GrpoConfig(num_minibatches=2, dynamic_sampling=True, max_resamples=2),
        eval=replace(first.config.eval, outcome="letters_in_place", threshold=0.5),
    )
    plan = replace(first.plan, num_minibatches=2)

    def trainer() -> Trainer:
        return Trainer(
            config, plan, first.policy, None, replace(first.inputs, outcome="letters_in_place"), first.device
        )

    ours = trainer()
    seen: dict[str, Any] = {"drawn": [], "metrics": []}
    for step in range(1, 5):
        if step == 3:
            state = ours.loader.state_dict()
        ours.collect(step)
        seen["drawn"].append([prompt.id for prompt in ours.last_rollout[0].prompts])  # type: ignore[index]
        ours.meter.update(ours.loader.numbers())
        seen["metrics"].append({k: v for k, v in ours.meter.reduce().items() if k.startswith("curriculum/")})
    seen["rates"] = ours.loader.rates().tolist()
    seen["position"] = ours.loader.position
    again = trainer()
    again.loader.load_state_dict(state)
    for step in (3, 4):
        again.collect(step)
    seen["resumed"] = again.loader.rates().tolist() == seen["rates"] and again.loader.position == seen["position"]
    return seen


if __name__ == "__main__":
    main(globals())
