"""The teacher's share of the memory plan."""

import pytest
from memory_plans import GPU, SIZES, N, micro_batch, recipe
from tiny_models import tiny_config

from hybrid_grpo.commands.plan import step_seconds
from hybrid_grpo.config import DataConfig, LoraConfig, PolicyConfig, RolloutConfig, TrainConfig
from hybrid_grpo.config.checks import batch_plan
from hybrid_grpo.config.data import MixtureConfig
from hybrid_grpo.features.teacher import teacher as teachers
from hybrid_grpo.features.teacher.settings import TeacherConfig
from hybrid_grpo.run.memory.dry_run import DryRun
from hybrid_grpo.run.memory.plan import Plan


def test_a_teacher_is_sharded_on_the_host_or_the_device_and_what_it_says_is_on_the_host(monkeypatch):
    count, rollout = 7_000_000_000, RolloutConfig(max_completion_tokens=1000)

    def teacher(weights: int = count, data: DataConfig | None = None, **settings) -> tuple[int, int]:
        """Bytes on the device and on its host, with 8 ranks of 32 completions."""
        monkeypatch.setattr(teachers, "parameters_of", lambda _: weights)
        config = recipe(3, rollout=rollout, teacher=TeacherConfig(**settings), data=data or DataConfig())
        made = Plan(config, SIZES, batch_plan(config, 8), 512, GPU, features=[teachers.TeacherMemory(config)])
        training = step_seconds(made)["training"]
        assert step_seconds(made)["teacher"] == pytest.approx((weights or N) / N * training / 3)
        on_device, on_host = (
            sum(part.bytes for part in phase.parts if part.name == "teacher") for phase in (made.phases[0], made.host)
        )
        return on_device, on_host

    assert teacher(model="m") == (0, 2 * count // 8)
    assert teacher(model="m", offload=False) == (2 * count // 8, 0)
    assert teacher(model="m", into="loss", top_k=64) == (0, 2 * count // 8 + 32 * 1000 * 64 * 8)
    assert teacher(0, prompt_column="solved", into="loss") == (0, 32 * 1000 * SIZES.vocabulary * 4)
    assert teacher(0, prompt_column="solved") == (0, 0)
    mixture = DataConfig(mixture=[MixtureConfig("a.jsonl"), MixtureConfig("b.jsonl", weight=3)])
    assert teacher(model="m", by_source={"a": "other"}, data=mixture) == (0, 2 * 2 * count // 8), "one for each"


@pytest.mark.parametrize("top_k", [0, 4])
def test_a_comparison_with_a_teacher_is_counted(top_k):
    """What is told at 98 places is there all the time; the head has some tiles, which are of all logits here."""
    config, settings = tiny_config("llama", hidden=64), (PolicyConfig(dtype="float32"), LoraConfig())
    head = teachers.TeacherMemory(
        TrainConfig(teacher=TeacherConfig(prompt_column="solved", into="loss", top_k=top_k))
    ).head
    plain = DryRun(config, *settings).training(micro_batch(2, 96))
    taught = DryRun(config, *settings, [head]).training(micro_batch(2, 96))
    logits = 98 * 4 * config.vocab_size
    assert plain.head + logits < taught.head < plain.head + 12 * logits
    assert taught.kept - plain.kept == (98 * (5 + 4) * 4 if top_k else logits)
