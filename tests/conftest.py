"""Fixtures of several files."""

import pytest

from hybrid_grpo.model.kernels import build as kernels


@pytest.fixture
def torch_only(monkeypatch):
    """No kernels for the CPU: as on a GPU, or without a compiler."""
    monkeypatch.setattr(kernels, "load", lambda: None)


@pytest.fixture(params=["kernels", "torch"])
def by(request):
    """Who computes: the kernels where they can be had, or torch."""
    if request.param == "torch":
        request.getfixturevalue("torch_only")
