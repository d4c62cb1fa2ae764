"""Fixtures of several files, and the order of tests."""

import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Triton's kernels are interpreted; it decides when they are imported.
    os.environ["TRITON_INTERPRET"] = "1"

from hybrid_grpo.model.kernels import build as kernels

# Matrices this small are slower on many threads, and far slower when tests share the processor.
torch.set_num_threads(1)

# `--hypothesis-profile thorough` looks further, as after a change of what a property is about.
settings.register_profile("suite", max_examples=50, deadline=None)
settings.register_profile("thorough", max_examples=1000, deadline=None)
settings.load_profile("suite")


def pytest_collection_modifyitems(items):
    """Files whose tests start processes come first: they take longest, and one begun last would be waited for."""
    long = {item.path for item in items if item.get_closest_marker("ranks") or item.get_closest_marker("process")}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture
def torch_only(monkeypatch):
    """No kernels for the CPU: as on a GPU, or without a compiler."""
    monkeypatch.setattr(kernels, "load", lambda: None)


@pytest.fixture(params=["kernels", "torch"])
def by(request):
    """Who computes: the kernels where they can be had, or torch."""
    if request.param == "torch":
        request.getfixturevalue("torch_only")
