"""DeepSpeed's own settings: which are refused, and which pass."""

import pytest
import torch
from refusals import refused
from user import User


@pytest.mark.parametrize("section, setting", refused("deepspeed"))
def test_deepspeed_keys_that_belong_to_a_setting(user: User, section: str, setting: str) -> None:
    recipe = f"engine: {{deepspeed: {section}}}"
    for message in (user.refused(yaml=recipe), user.refused("--engine.deepspeed", section)):
        assert message.startswith("engine.deepspeed.") and setting in message


def test_settings_of_sharded_weights_need_weights_that_are_sharded(user: User) -> None:
    for given in ("zero_hpz_partition_size: 2", "offload_param: {device: cpu}"):
        section = f"{{zero_optimization: {{{given}}}}}"
        message = user.refused("--engine.deepspeed", section, "--engine.zero_stage", "2", ranks=2)
        assert given.partition(":")[0] in message and message.endswith("set engine.zero_stage to 3")


def test_one_rank_shards_nothing_unless_settings_are_about_shards(user: User) -> None:
    engine = user.train(ranks=2).engine
    assert (engine.zero_stage, engine.stage(1), engine.stage(2)) == (None, 2, 3)
    assert user.train("--engine.zero_stage=1").engine.stage(8) == 1
    for given in ("zero_hpz_partition_size: 1", "offload_param: {device: cpu}", "stage3_max_live_parameters: 1000"):
        section = f"{{zero_optimization: {{{given}}}}}"
        assert user.train("--engine.deepspeed", section).engine.stage(1) == 3


def test_updates_that_bfloat16_would_round_away_are_refused(user: User) -> None:
    """Adam moves a weight by about the learning rate; half a unit in the last place of 0.02 is more than 1e-6."""
    assert torch.tensor(0.02, dtype=torch.bfloat16) - 1e-6 == torch.tensor(0.02, dtype=torch.bfloat16)
    given = "--engine.deepspeed", "{bf16: {bf16_master_weights_and_grads: true}}"
    assert user.refused(*given).endswith("at policy.lr 1e-06 most updates would round to nothing in bfloat16: remove"
                                         " it, or set policy.lr to 4e-05 or more")  # fmt: skip
    assert user.train(*given, "--policy.lr", "1e-4").policy.lr == 1e-4


def test_deepspeed_keys_that_belong_to_nobody_pass(user: User) -> None:
    overlap = {"zero_optimization": {"overlap_comm": False, "zero_quantized_weights": False}}
    given = "{zero_optimization: {overlap_comm: false, zero_quantized_weights: false}}"
    assert user.train("--engine.deepspeed", given).engine.deepspeed == overlap
