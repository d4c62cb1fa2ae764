"""A checkpoint that threads write while the run goes on."""

import threading
from pathlib import Path

import pytest
import torch
from launching import make_task, ranks
from rank_threads import in_ranks

from hybrid_grpo.model import tensor_files
from hybrid_grpo.model.ranks import rank
from hybrid_grpo.records.write_failures import WriteFailed
from hybrid_grpo.run.saving import space
from hybrid_grpo.run.saving.checkpoint import Checkpoints

LAYOUTS = ("offloaded", "stage 2", "stage 1 in bfloat16", "stage 0", "adapters")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """By layout: the files of a checkpoint that was written beside the next step, of the same one that was waited for,
    and of the next one."""
    folder = make_task(tmp_path_factory.mktemp("task"))
    return ranks(2, "both", folder, programs="saving_programs.py")[0]


@pytest.mark.ranks
@pytest.mark.parametrize("layout", [*LAYOUTS, "features"])
def test_files_are_those_of_a_checkpoint_that_is_waited_for_to_the_byte(written, layout):
    beside, alone, later = written[layout]
    assert beside == alone and beside.keys() == later.keys()
    names = {name.partition("_000")[0] for name in beside}
    expected = {"policy", "state"} | ({"reference"} if layout != "adapters" else set())
    assert names == expected | ({"critic/policy", "critic/state", "average"} if layout == "features" else set())
    # Otherwise a step that changed the tensors too early could not be seen. (Rank 1 has nothing at stage 0.)
    same = {name for name in beside if beside[name] == later[name]}
    assert same <= {"policy_00001_of_00002.pt"} if layout == "stage 0" else not same
