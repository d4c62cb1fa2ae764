import random

import pytest
import torch


@pytest.fixture
def seeded():
    """The random numbers of a case."""

    def of(case):
        return random.Random(case), torch.Generator().manual_seed(case)

    return of
