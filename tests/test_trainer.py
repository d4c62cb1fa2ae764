"""The parts of a step that need no engine: rewards beside sampling, and which log-probabilities the loss takes."""

import math
from dataclasses import replace
from types import SimpleNamespace

import gpu_attention
import numpy as np
import pytest
import torch
from host_waits import HostWaits
from paths import SUPPORT
from reward_helpers import in_time, inline, isolated
from tiny_models import VOCABULARY, build, tiny_config

from hybrid_grpo.config import GrpoConfig, PolicyConfig, RewardConfig, RolloutConfig, TrainConfig
from hybrid_grpo.config.checks import batch_plan
from hybrid_grpo.data.batch import Completion, Prompt, Rollout, Scores, TrainBatch
from hybrid_grpo.data.loader import TrainingPrompts
from hybrid_grpo.data.packing import pack, pad
from hybrid_grpo.engine import StepResult
from hybrid_grpo.generation import Stats
from hybrid_grpo.grpo.loss import micro_batch_loss
from hybrid_grpo.grpo.minibatches import Signals
from hybrid_grpo.grpo.objective import load_objective
from hybrid_grpo.grpo.selection import OldPolicy
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.logprobs import LogprobModel
from hybrid_grpo.model.support import SamplingMask
from hybrid_grpo.model.upload import upload
from hybrid_grpo.policy import Policy
from hybrid_grpo.records.metrics.meter import Meter
from hybrid_grpo.rewards.scorer import Rewards
from hybrid_grpo.trainer import Trainer

P, G = 8, 2


class SamplingContext:
    """Stands for a policy: finishes group after group, and scores every token with log 1/2."""

    def __init__(self) -> None:
        self.engine = SimpleNamespace(gather_s=0.0, release_s=0.0, wait_s=0.0)

    def rollout(self, prompts, config, stop_ids, *, seed, step, on_finish, on_step, given, **_):
        rows = []
        for i in range(len(prompts)):
            for k in range(G):
                rows.append(Completion([i, k], [-1.0, -1.0], "stop", f"{i}{k}"))
                on_finish(i, k, rows[-1])
        return Rollout(prompts, rows, G), Stats()

    def micro_batches(self, rows, *, gradients, together):
        return pad(rows, 16384, torch.device("cpu"), together=together)

    def forward(self, micro, temperature):
        return torch.full(micro.mask_bT.shape, math.log(0.5), requires_grad=True), torch.zeros(micro.mask_bT.shape)

    def logprobs(self, batches, shape, temperature):
        return torch.full(shape, math.log(0.5))


SLOW = RewardConfig(f"{SUPPORT.joinpath('acting_rewards.py')}:leaves_files", name="slow", batch_size="group")
WIDE = {"epsilon_low": 0.9, "epsilon_high": 0.9}


def slow(completions):
    return [0.0] * len(completions)


def replaced(rollout: Rollout, **changes) -> Rollout:
    return replace(rollout, completions=[replace(c, **changes) for c in rollout.completions])


def trainer(policy: SamplingContext, grpo=None, **rollout) -> Trainer:
    config = TrainConfig(
        rollout=RolloutConfig(prompts_per_step=P, num_generations=G, **rollout), grpo=GrpoConfig(**(grpo or {}))
    )
    task = SimpleNamespace(
        rewards=Rewards([inline(slow)]), outcome="slow",
        training=TrainingPrompts([Prompt(i, f"p{i}", [1], {}) for i in range(P)], ""), eval_sets=[], stop_ids=(),
        objective=None, parts={}, partners=None,
    )  # fmt: skip
    return Trainer(config, batch_plan(config, 1), policy, None, task, torch.device("cpu"))


def first_step(run: Trainer, rollout: Rollout, old_logp_BT: torch.Tensor | None = None) -> list[TrainBatch]:
    """The micro-batches of the first optimizer step, on the whole rollout, all of whose advantages are 1."""
    signals = Signals(rollout.logp_BT, old_logp_BT, None, torch.ones(P * G, 2))
    return list(next(run.optimizer_steps(rollout, signals)))


def loss_of(run: Trainer, batch: TrainBatch) -> torch.Tensor:
    """The loss of a micro-batch; the trainer's meter has its numbers."""
    logp_bT, entropy_bT = run.policy.forward(batch.micro, 1.0)
    loss, numbers = micro_batch_loss(batch, logp_bT, entropy_bT, run.config.grpo, run.kl.beta, run.inputs.objective)
    run.meter.update(numbers)
    return loss


@pytest.mark.process
def test_rewards_run_while_others_are_sampled(tmp_path):
    run = trainer(SamplingContext())
    run.inputs.rewards = isolated(replace(SLOW, kwargs={"folder": str(tmp_path)}))
    prompts = run.draw_prompts()
    with run.inputs.rewards.stream(prompts, G) as stream:

        def finish(group, k, completion):
            stream.add(group, k, completion)
            assert k < G - 1 or in_time((tmp_path / completion.text).exists), "the next group is sampled after that"

        run.sample(prompts, 1, finish)
        scores = stream.scores()
    assert scores.reward_B.tolist() == [10.0 * i + k for i in range(P) for k in range(G)]
    assert stream.seconds >= P * 0.05


@pytest.mark.parametrize("logprobs, old_logp, first, later", [
    ("softmax", "auto", 1.0, 0.5 / math.exp(-0.8)),
    ("mask", "auto", 1.0, 0.5 / math.exp(-0.8)),
    ("softmax", "policy", 1.0, 1.0),
    ("sampling", "auto", 1.0, 1.0),
    ("sampling", "sampler", 0.5 / math.exp(-0.8), 0.5 / math.exp(-0.8)),
])  # fmt: skip
def test_whose_logprobs_the_ratios_are_relative_to(logprobs, old_logp, first, later):
    """The sampler recorded -0.8 where the policy says log 1/2, as if another distribution had been drawn from."""
    run = trainer(SamplingContext(), {"num_iterations": 2, "old_logp": old_logp, **WIDE}, logprobs=logprobs, top_p=0.9)
    rollout = replaced(run.sample(run.draw_prompts(), 1, lambda *_: None), logp=[-0.8, -0.8])
    old_logp_BT = run.old_logprobs(rollout)
    assert old_logp_BT is not None
    ratios = []
    signals = Signals(rollout.logp_BT, old_logp_BT, None, torch.ones(P * G, 2))
    for batches in run.optimizer_steps(rollout, signals):
        for batch in batches:
            loss = loss_of(run, batch)
        ratios.append(run.meter.reduce()["policy/ratio_max"])
        assert loss.item() == pytest.approx(-ratios[-1])
    assert ratios == pytest.approx([first, later])


def test_one_optimizer_step_needs_no_pass_for_old_logp():
    settings = {"sampler_correction": "truncate", "sampler_ratio_max": 1.05}
    run = trainer(SamplingContext(), settings)
    rollout = replaced(run.sample(run.draw_prompts(), 1, lambda *_: None), logp=[-0.8, math.log(0.5)])
    assert run.old_logprobs(rollout) is None
    assert trainer(SamplingContext(), {**settings, "num_iterations": 2}).old_logprobs(rollout) is not None
    (batch,) = first_step(run, rollout)
    loss = loss_of(run, batch)
    # exp(log 1/2 + 0.8) is 1.11: cut at 1.05; the other token's ratio is 1.
    assert loss.item() == pytest.approx(-(1.05 + 1) / 2)
    values = run.meter.reduce()
    assert values["parity/ratio_max"] == pytest.approx(0.5 / math.exp(-0.8))
    assert values["parity/ratio_mean"] == pytest.approx((0.5 / math.exp(-0.8) + 1) / 2)
    assert values["parity/corrected_frac"] == 0.5 and values["policy/ratio_max"] == 1.0


@pytest.mark.parametrize("loss_type, share", [("dapo", 1 / 28), ("grpo", 1 / 28), ("dr_grpo", 1 / (14 * 512))])
def test_truncated_completions_weigh_nothing_and_count_nowhere(loss_type, share):
    run = trainer(SamplingContext(), {"mask_truncated": True, "loss_type": loss_type})
    rollout = run.sample(run.draw_prompts(), 1, lambda *_: None)
    cut = [replace(c, finish="length") for c in rollout.completions[:2]]
    rollout = replace(rollout, completions=cut + rollout.completions[2:])
    cut_out, learned = first_step(run, rollout)
    assert not cut_out.has_gradient and learned.has_gradient
    by_row = {row: b.weight_bT[i].tolist() for b in (cut_out, learned) for i, row in enumerate(b.micro.rows)}
    assert by_row[0] == by_row[1] == [0.0, 0.0]
    assert by_row[2] == pytest.approx([share, share])


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_a_loss_of_nothing_is_zero(loss_type):
    run = trainer(SamplingContext(), {"mask_truncated": True, "loss_type": loss_type, "sampler_correction": "mask"})
    rollout = run.sample(run.draw_prompts(), 1, lambda *_: None)
    rollout = replace(rollout, completions=[replace(c, finish="length") for c in rollout.completions])
    batches = first_step(run, rollout)
    assert [(b.has_gradient, len(b.micro.rows)) for b in batches] == [(False, P * G - 1), (True, 1)]
    for batch in batches:
        loss = loss_of(run, batch)
        loss.backward()
        assert loss.item() == 0.0
    assert "policy/entropy" not in run.meter.reduce()


@pytest.mark.parametrize("loss_type, share", [("dapo", 1 / 16), ("grpo", 1 / 16), ("dr_grpo", 1 / (8 * 512))])
def test_a_completion_that_is_only_compared_with_has_a_part_in_no_loss(loss_type, share):
    """It takes part in the mean and the spread of its group, and its tokens are not even computed."""
    run = trainer(SamplingContext(), {"loss_type": loss_type})
    rollout = run.sample(run.draw_prompts(), 1, lambda *_: None)
    rows = [
        replace(c, writer="seeds", learned=False, logp=[]) if k % G else c for k, c in enumerate(rollout.completions)
    ]
    rollout = replace(rollout, completions=rows)
    (batch,) = first_step(run, rollout)
    assert sorted(batch.micro.rows) == list(range(0, P * G, G)) and not batch.writers
    assert batch.weight_bT.unique().tolist() == pytest.approx([share])
    reward_B = torch.arange(P * G, dtype=torch.float64) ** 2
    advantages_BT = run.advantages(rollout, Scores(reward_B, {}, {}), OldPolicy(None), None)
    low, high = reward_B.view(P, G).unbind(1)
    assert advantages_BT[::G, 0].tolist() == pytest.approx(((low - high) / 2 / ((high - low) / 2**0.5 + 1e-4)).tolist())


def test_a_micro_batch_without_rows_has_all_fields_of_the_others_and_counts_for_nothing(monkeypatch):
    """Another rank has more micro-batches. The filler had no reference, so a KL in the loss ended the run."""
    monkeypatch.setattr("hybrid_grpo.data.packing.all_reduce", lambda value, op: value + 1)
    run = trainer(SamplingContext(), {"beta": 0.1, "kl_unbiased": True, "entropy_coef": 0.1, "num_iterations": 2})
    rollout = run.sample(run.draw_prompts(), 1, lambda *_: None)
    rows = [replace(c, writer="seeds") if k % G else c for k, c in enumerate(rollout.completions)]
    rollout, other_BT = replace(rollout, completions=rows), torch.full((P * G, 2), -0.7)
    signals = Signals(rollout.logp_BT, other_BT, other_BT, torch.ones(P * G, 2))
    for batch, filler in run.optimizer_steps(rollout, signals):
        assert batch.micro.rows and not filler.micro.rows
        assert [type(value) for value in vars(filler).values()] == [type(value) for value in vars(batch).values()]
        assert filler.writers.keys() == batch.writers.keys() == {"seeds"}
        for one, counts in ((batch, True), (filler, False)):
            logp_bT, entropy_bT = run.policy.forward(one.micro, 1.0)
            loss, numbers = micro_batch_loss(one, logp_bT, entropy_bT, run.config.grpo, run.kl.beta)
            loss.backward()
            assert {bool(count) for _, count in numbers.values()} == {counts} and (loss.item() != 0) == counts


def test_an_own_loss_takes_the_place_of_the_built_in_one(tmp_path):
    file = tmp_path / "losses.py"
    file.write_text(
        "def reinforce(logp_bT, old_logp_bT, advantages_bT, weight_bT, grpo, *, beta, **others):\n"
        "    return -(weight_bT * advantages_bT * logp_bT).sum()\n"
    )
    run = trainer(SamplingContext())
    rollout = run.sample(run.draw_prompts(), 1, lambda *_: None)
    (batch,) = first_step(run, rollout)
    built_in = loss_of(run, batch)
    run.inputs.objective = load_objective(GrpoConfig(objective=f"{file}:reinforce"))
    own = loss_of(run, batch)
    # All advantages are 1, so the weights sum to 1: the built-in loss has ratio 1, the own one the log-probability.
    assert built_in.item() == pytest.approx(-1.0) and own.item() == pytest.approx(-math.log(0.5))
    assert run.meter.reduce()["policy/ratio_max"] == 1.0


class InBfloat16(Policy):
    """A policy whose engine is the bare model, with gradient checkpointing. It notes how many `waits` there were at its
    first forward and at its last optimizer step."""

    def __init__(self, waits: HostWaits) -> None:
        model = build(tiny_config("qwen2"), ATTENTION).to(torch.bfloat16).train()
        model.activation_checkpointing_enable({"use_reentrant": False})
        self.config, self.optimizer_steps, self.total_steps = PolicyConfig(), 0, 10
        self.engine, self.waits, self.forwards = LogprobModel(model), waits, []
        self.engine.backward = lambda loss: loss.backward()

    def micro_batches(self, rows, *, gradients, together):
        return pack(rows, 60, torch.device("cpu"), share="on")

    def forward(self, micro, temperature, more=None):
        self.forwards.append(len(self.waits.seen))
        return super().forward(micro, temperature, more)

    def step(self) -> StepResult:
        self.stepped = len(self.waits.seen)
        return StepResult(1.0, True)


@pytest.mark.usefixtures("torch_only")
@pytest.mark.parametrize("flash, filtered", [(True, False), (False, False), (True, True)])
def test_the_host_waits_for_nothing_between_the_first_forward_and_the_last_step(monkeypatch, flash, filtered):
    """Two optimizer steps with all that a micro-batch may do. A host that waits for a GPU then makes it wait too."""
    gpu_attention.install(monkeypatch, flash=flash)
    waits, generator = HostWaits(), torch.Generator().manual_seed(0)
    settings = {"beta": 0.1, "kl_target": 0.1, "mask_truncated": True, "entropy_coef": 0.01, "num_minibatches": 2}
    run = trainer(policy := InBfloat16(waits), {**settings, "sampler_correction": "truncate"})
    run.meter = Meter()

    def tokens(count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=generator).tolist()

    prompts = [Prompt(i, "", tokens(6 + i), {}) for i in range(P)]
    ends = ["stop", "stop", "length"]
    writers = ["", "", "", "", "other"]
    rows = [
        Completion(ids := tokens(4 + k % 5), [-4.0] * len(ids), ends[k % 3], writer=writers[k % 5])
        for k in range(P * G)
    ]
    if filtered:
        rows = [
            replace(c, sidecars=(SamplingMask.of([np.unique([token, 1, 2, 3]) for token in c.token_ids]),))
            for c in rows
        ]
    rollout = Rollout(prompts, rows, G)
    given_BT, run.reference = rollout.logp_BT, object()
    # The first forward checks the kernels, where the start of a run has not. What the check saved for its own gradients
    # was counted among the tensors of the checkpointed forward, whose recomputation then failed.
    logp_bT, _ = policy.forward(run.micro_batches(rollout, range(P * G))[0], 1.0)
    logp_bT.sum().backward()
    policy.engine.zero_grad()
    policy.forwards.clear()
    with waits:
        run.improve(rollout, Signals(given_BT, given_BT, given_BT * 1.1, torch.ones_like(given_BT)))
    assert len(policy.forwards) >= 4
    assert waits.seen[policy.forwards[0] : policy.stepped] == []
    values = run.meter.reduce()
    assert values["policy/kl"] > 0
    assert values["parity/logp_abs_diff_mean"] > 0 and values["policy/entropy"] > 0
    assert all(p.grad is not None for p in policy.engine.parameters())


def test_what_would_wait_is_noticed():
    """The test above would prove nothing if its double saw nothing."""
    x, mask = torch.arange(3.0, requires_grad=True), torch.tensor([True, False, True])
    waiting = {
        "_local_scalar_dense": lambda: bool(mask.all()), "tolist": lambda: x.tolist(), "index": lambda: x[mask],
        "lift_fresh": lambda: x[[0, 2]],
        "masked_scatter_backward": lambda: torch.zeros(3).masked_scatter(mask, x).sum().backward(),
        "": lambda: x[upload([0, 2], x.device)],
    }  # fmt: skip
    for name, operation in waiting.items():
        waits = HostWaits(everywhere=True)
        with waits:
            operation()
        assert [seen.split()[0] for seen in waits.seen] == ([name] if name else [])


class Plain(Policy):
    """A policy whose engine is the bare model in float32, and whose steps change nothing. It counts the micro-batches
    that go backward and those that only go forward."""

    def __init__(self, packed: bool) -> None:
        torch.manual_seed(0)
        self.config, self.optimizer_steps, self.total_steps = PolicyConfig(micro_batch_tokens=40), 0, 10
        self.engine = LogprobModel(build(tiny_config("qwen2"), ATTENTION if packed else "sdpa").train())
        self.engine.backward, self.engine.device = self.backward, torch.device("cpu")
        self.packs, self.backwards, self.forwards = packed, 0, 0

    def backward(self, loss):
        self.backwards += 1
        loss.backward()

    def forward(self, micro, temperature, more=None):
        self.forwards += not torch.is_grad_enabled()
        return super().forward(micro, temperature, more)

    def step(self) -> StepResult:
        return StepResult(1.0, True)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("zero", [range(P // 2), range(1, P), range(P)])
def test_rows_whose_gradient_is_zero_leave_the_backward_pass_and_nothing_else_changes(packed, zero):
    """Gradients and metrics are those of training on all rows. If no row has a gradient, one goes backward."""
    rollout = Rollout(
        [Prompt(i, "", [i + 1] * (2 + i), {}) for i in range(P)],
        [Completion([5 + n % 7] * (3 + n % 5), [-3.0] * (3 + n % 5), "stop") for n in range(P * G)],
        G,
    )
    advantages_PGT = torch.randn(P, G, 7, generator=torch.Generator().manual_seed(1))
    advantages_PGT[list(zero)] = 0.0
    seen = {}
    for can_skip_backward in (True, False):
        policy = Plain(packed)
        run = trainer(policy, {"num_minibatches": 2, "num_iterations": 2})
        run.meter = Meter()
        assert run.max_over_ranks is not None
        run.max_over_ranks = run.max_over_ranks if can_skip_backward else None
        run.improve(rollout, Signals(rollout.logp_BT, rollout.logp_BT, None, advantages_PGT.flatten(0, 1)))
        gradients = torch.cat([p.grad.flatten() for p in policy.engine.parameters()])
        seen[can_skip_backward] = gradients, run.meter.reduce(), (policy.backwards, policy.forwards)
    (ours, values, counts), (theirs, expected, all_go_back) = seen[True], seen[False]
    assert counts[0] < all_go_back[0] and counts[1] > 0 == all_go_back[1]
    assert expected.pop("policy/no_gradient_frac") == 0.0
    tokens = [rollout.lengths[group * G + k] for group in zero for k in range(G)]
    share = values.pop("policy/no_gradient_frac")
    assert share <= sum(tokens) / rollout.num_tokens and share >= (sum(tokens) - 2 * 7) / rollout.num_tokens
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7) and values == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("grpo", [{"beta": 0.1}, {"entropy_coef": 0.1}])
def test_rows_that_have_another_term_stay_in_the_backward_pass(grpo):
    assert trainer(SamplingContext(), grpo).max_over_ranks is None
    assert trainer(SamplingContext(), {"beta": 0.1, "kl_in": "reward"}).max_over_ranks is not None
