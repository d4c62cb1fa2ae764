"""Fixtures of several files, and the order of tests."""

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from long_tests import few, listed
from user import User
from workshop import Workshop

if not torch.cuda.is_available():
    # Triton's kernels are interpreted; it decides when they are imported.
    os.environ["TRITON_INTERPRET"] = "1"

from hybrid_grpo.model.kernels import build as kernels

TRAIN = [
    *("train", "--config=train.yaml", "--engine.zero_stage=3", "--eval.every=2", "--run.steps=6"),
    *("--checkpoint.every=2", "--checkpoint.keep=9", "--curriculum.sampling=difficulty"),
    # A weight of the KL that is adapted, and a reference that follows the policy.
    *("--grpo.beta=0.1", "--grpo.kl_target=0.001", "--grpo.ref_every=1", "--grpo.ref_mix=0.5"),
]

# Matrices this small are slower on many threads, and far slower when tests share the processor.
torch.set_num_threads(1)

# A machine that others use takes its time.
PATIENT: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# `--hypothesis-profile thorough` looks further, as after a change of what a property is about.
settings.register_profile("suite", max_examples=50, **PATIENT)
settings.register_profile("thorough", max_examples=1000, **PATIENT)
settings.load_profile("suite")


def pytest_addoption(parser):
    parser.addoption("--long", choices=["all", "few", "none"], default="all", help="how many cases of long.txt to run")


def pytest_collection_modifyitems(config, items):
    """Leave out cases of long tests. Files whose tests start processes come first: they take longest, and one begun
    last would be waited for."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for name, seconds in listed().items() if config.getoption("--long") != "all" else ():
        kept = few(cases[name], seconds) if config.getoption("--long") == "few" else []
        left_out.update(item for item in cases[name] if item not in kept)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]
    long = {item.path for item in items if item.get_closest_marker("ranks") or item.get_closest_marker("process")}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path)


@pytest.fixture
def torch_only(monkeypatch):
    """No kernels for the CPU: as on a GPU, or without a compiler."""
    monkeypatch.setattr(kernels, "load", lambda: None)


@pytest.fixture(params=["kernels", "torch"])
def by(request):
    """Who computes: the kernels where they can be had, or torch."""
    if request.param == "torch":
        request.getfixturevalue("torch_only")


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
    """A real run of two ranks, of which tests copy, damage and go on with what they need."""
    workshop = Workshop(tmp_path_factory.mktemp("whole"))
    done = workshop.run(*TRAIN, "--run.name=whole", "--log.profile=4", ranks=2)
    assert done.status == 0, done.err
    yield WholeRun(workshop, TRAIN)
    workshop.close()
