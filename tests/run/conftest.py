"""One real run of two ranks, of which tests copy, damage and go on with what they need."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from workshop import Workshop

TRAIN = [
    *("train", "--config=train.yaml", "--engine.zero_stage=3", "--eval.every=2", "--run.steps=6"),
    *("--checkpoint.every=2", "--checkpoint.keep=9", "--curriculum.sampling=difficulty"),
    # A weight of the KL that is adapted, and a reference that follows the policy.
    *("--grpo.beta=0.1", "--grpo.kl_target=0.001", "--grpo.ref_every=1", "--grpo.ref_mix=0.5"),
]


@dataclass(frozen=True)
class WholeRun:
    """A run of six steps in one go, with a checkpoint after every second one, and its fourth step traced."""

    workshop: Workshop
    arguments: list[str]

    @property
    def folder(self) -> Path:
        return self.workshop.folder / "runs" / "whole"


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory):
    workshop = Workshop(tmp_path_factory.mktemp("whole"))
    done = workshop.run(*TRAIN, "--run.name=whole", "--log.profile=4", ranks=2)
    assert done.status == 0, done.err
    yield WholeRun(workshop, TRAIN)
    workshop.close()
