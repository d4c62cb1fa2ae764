"""A critic beside the policy: the same steps on one rank and on two, at any ZeRO stage, and after going on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from launching import make_task, ranks
from tiny_models import build, tiny_config

from hybrid_grpo.config import PolicyConfig
from hybrid_grpo.data.packing import pack, pad
from hybrid_grpo.features.critic.critic import Critic
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.scalar_model import ScalarModel, load_scalar_model

Seen = dict[str, Any]

PROGRAMS = str(Path(__file__).with_name("programs.py"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Seen, Seen]:
    """What one rank of two has seen, and then one alone."""
    folder = make_task(tmp_path_factory.mktemp("task"))
    two, _ = ranks(2, "two", folder, programs=PROGRAMS)
    (one,) = ranks(1, "one", folder, programs=PROGRAMS)
    return two, one


def assert_close(ours: Seen, theirs: Seen) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, float | int):
            assert ours[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
        else:
            for weight, numbers in value.items():
                assert ours[name][weight] == pytest.approx(numbers, abs=1e-5), weight


@pytest.mark.ranks
def test_a_step_depends_neither_on_the_ranks_nor_on_the_stage(runs: tuple[Seen, Seen]) -> None:
    two, one = runs
    for ours, theirs in zip(two["steps"], one["steps"], strict=True):
        assert_close(ours, theirs)
    assert_close(one["resumed"][0], one["steps"][2])


@pytest.mark.ranks
def test_a_run_goes_on_to_the_bit(runs: tuple[Seen, Seen]) -> None:
    two, _ = runs
    assert two["again"] == two["resumed"] == two["steps"][2:]


@pytest.mark.ranks
def test_the_critic_learns_alone_and_then_with_the_policy(runs: tuple[Seen, Seen]) -> None:
    alone, *later = runs[1]["steps"]
    assert alone["critic/value"] == 0.0 and alone["critic/explained_variance"] == pytest.approx(0.0, abs=1e-12)
    assert alone.keys() & {"policy/loss", "policy/grad_norm"} == set()
    for step in later:
        assert step["critic/value"] != 0.0 and step["policy/grad_norm"] > 0 and step["critic/grad_norm"] > 0
        assert 0 < step["critic/clip_frac"] < 1
    assert later[0]["Critic"] != later[1]["Critic"] and later[0]["Policy"] != alone["Policy"]


@pytest.mark.ranks
def test_the_command_trains_both_and_saves_both(runs: tuple[Seen, Seen]) -> None:
    """The rates fall to 0 at the end of the run: the critic's over three steps, the policy's over its two."""
    alone, *both = runs[1]["metrics"]
    assert [line["critic/lr"] for line in (alone, *both)] == pytest.approx([1e-5, 1e-5 * 2 / 3, 1e-5 / 3])
    assert "policy/lr" not in alone and [line["policy/lr"] for line in both] == pytest.approx([1e-6, 1e-6 / 2])
    assert both[-1]["time/critic_s"] > 0
    assert runs[1]["files"] == ["policy_00000_of_00001.pt", "state_00000_of_00001.pt"]


@pytest.mark.parametrize("share", ["on", "off", "padded"])
def test_a_value_is_that_of_the_state_before_its_token(tmp_path: Path, share: Any) -> None:
    """Against transformers' own forward of each row; rows of a prompt share it, and the last token is never read."""
    build(tiny_config("qwen2", tie_word_embeddings=False)).save_pretrained(tmp_path)
    policy = PolicyConfig(model=str(tmp_path), dtype="float32")
    model = load_scalar_model(policy, "eager" if share == "padded" else ATTENTION, seed=1)
    plain = load_scalar_model(policy, "eager", seed=1)
    critic = Critic.__new__(Critic)
    critic.engine = cast(Any, ScalarModel(model))
    critic.engine.device = torch.device("cpu")
    prompts = [[1, 2, 3], [1, 2, 3], [1, 2, 3], [9, 8]]
    completions = [[4], [5, 6, 7], [5, 8], [10, 11, 12, 13]]
    given = prompts, completions, range(4), 9, torch.device("cpu")
    batches = pad(*given) if share == "padded" else pack(*given, share=share)
    assert len(batches) > 1
    value_BT = critic.values(batches, (4, 4))
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        hidden_1SD = plain.base_model(torch.tensor([[*prompt, *completion[:-1]]])).last_hidden_state
        expected_T = plain.score(hidden_1SD[0, len(prompt) - 1 :]).squeeze(-1)
        assert expected_T.abs().min() > 1e-4
        assert value_BT[row, : len(completion)].tolist() == pytest.approx(expected_T.tolist(), abs=1e-5)
        assert not value_BT[row, len(completion) :].any()
