"""The teachers of a run: frozen models next to the policy, or the policy itself with another prompt.

The policy learns to minimize a divergence of the next token from the teacher's, such as the reverse KL divergence
KL(policy || teacher), at prefixes that it samples itself (GKD, arXiv:2306.13649, section 3). As in GKD, no gradient
flows through the sampling of prefixes: a token is only responsible for its own divergence, whereas in MiniLLM
(arXiv:2306.08543) it is also responsible for the divergences at later tokens. With policy p and teacher q, the gradient
of the reverse KL divergence at a prefix is sum_v p_v (log p_v - log q_v) grad log p_v. It can be computed

- as the expectation of (log p_v - log q_v) grad log p_v over tokens v drawn from p: a constant advantage of -(log p_v -
  log q_v) for the sampled token ("On-Policy Distillation", Thinking Machines Lab, 2025);
- as the gradient of this or another divergence, which the head computes over the vocabulary (divergence.py).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hybrid_grpo import engine as engines
from hybrid_grpo.config import BatchPlan, TrainConfig
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.data.batch import Numbers, Rollout, TrainBatch
from hybrid_grpo.features.teacher.divergence import Divergence, NextTokens, head_divergence, most_likely
from hybrid_grpo.features.teacher.models import TeacherModel
from hybrid_grpo.features.teacher.settings import TeacherConfig
from hybrid_grpo.model.limits import vocabulary_of
from hybrid_grpo.model.loading import load_config, parameters_of
from hybrid_grpo.model.logprobs import HeadFunction
from hybrid_grpo.model.routing import Routing
from hybrid_grpo.model.sidecars import without
from hybrid_grpo.model.upload import upload
from hybrid_grpo.policy import Policy
from hybrid_grpo.run.feature import Advantages, Feature, LossTerm, Scored
from hybrid_grpo.run.inputs import RunInputs
from hybrid_grpo.run.memory.phases import FeatureMemory, Part
from hybrid_grpo.run.memory.plan import Plan


class TeacherMemory(FeatureMemory):
    """Plans the sharded weights of all teachers and, with `teacher.into` loss, their distributions at all tokens of a
    rollout, on the host: float32 and, with `top_k`, the tokens. Their forward passes keep nothing, like that of the
    reference, and follow each other, so that no two teachers are gathered at once."""

    name = "teacher"

    def __init__(self, config: TrainConfig) -> None:
        self._settings = settings = config.of(TeacherConfig)
        self._parameters = {name: parameters_of(name) if name else 0 for name in settings.teachers(config.data)}
        weights = {source.name: source.weight for source in config.data.mixture} or {"": 1.0}
        self._shares = [
            (weight / sum(weights.values()), self._parameters[settings.model_of(source)])
            for source, weight in weights.items()
        ]

    def part(self, plan: Plan, on_host: bool) -> Part:
        settings, places = self._settings, plan.rows * plan.config.rollout.max_completion_tokens
        weights = plan.dtype * sum(self._parameters.values()) // plan.ranks if settings.offload == on_host else 0
        # Towers, which every rank has on its device, are taken to be as large as the policy's.
        towers = plan.tower * sum(name is not None for name in self._parameters)
        weights += 0 if on_host else plan.dtype * towers
        kept = places * (8 * settings.top_k or 4 * plan.sizes.vocabulary) if settings.keeps_vocabulary else 0
        fewer = "teacher.top_k 64, " if kept and not settings.top_k else ""
        remedy = f"{fewer}more ranks" if on_host else "teacher.offload true, more ranks"
        return Part("teacher", weights + (kept if on_host else 0), remedy)

    def seconds(self, plan: Plan, forward: float, passes: int) -> float:
        """Return the time of one forward pass in which every row is read by its teacher, maybe the policy itself."""
        own = plan.sizes.parameters
        return forward * sum(share * (parameters or own) for share, parameters in self._shares) / own

    def head(self, places: int, vocabulary: int) -> HeadFunction | None:
        if not self._settings.keeps_vocabulary:
            return None
        top_k = self._settings.top_k
        tokens = torch.empty(places, top_k, dtype=torch.int32) if top_k else None
        expected = torch.empty(places, top_k + 1 if top_k else vocabulary)
        divergence = Divergence(self._settings.divergence, self._settings.jsd_beta)
        return partial(head_divergence, teacher=NextTokens(expected, tokens, vocabulary), divergence=divergence)


class Teacher(Feature):
    """Scores the tokens that the policy has sampled, or (`guests.writers`) should learn to write. Several teachers
    share the rows by the source of the prompt, and read them one after the other."""

    name, memory = "teacher", TeacherMemory
    is_timed = needs_old_logp = True
    _policy: Policy

    def __init__(self, config: TrainConfig, plan: BatchPlan, inputs: RunInputs) -> None:
        super().__init__(config, plan, inputs)
        self._settings = settings = config.of(TeacherConfig)
        self._temperature = config.rollout.temperature
        self._divergence = Divergence(settings.divergence, settings.jsd_beta)
        self._teachers = [TeacherModel(name, config, inputs) for name in settings.teachers(config.data)]
        # Heads in a model family may differ in size.
        own = vocabulary_of(inputs.tokenizer, load_config(config.policy.model))
        self._vocabulary = min(own, *(teacher.vocabulary for teacher in self._teachers))
        refuse(
            settings.top_k >= self._vocabulary,
            f"teacher.top_k {settings.top_k} is not below the vocabulary, {self._vocabulary}: set 0, which takes all",
        )
        for teacher in self._teachers:
            teacher.check()
        self._next_tokens: dict[int, NextTokens] = {}

    def load(self, policy: Policy) -> None:
        self._policy = policy
        for teacher in self._teachers:
            teacher.load(policy)

    def advantages(self, scored: Scored) -> Advantages:
        """Return the teachers' term in the advantages. With `teacher.into` loss there is none, and the teachers'
        distributions are kept for `loss`. Collective."""
        assert scored.old_logp_BT is not None
        logp_BT, self._next_tokens = self.read(scored.rollout, scored.old_logp_BT)
        sampled_B = torch.tensor([not completion.writer for completion in scored.rollout.completions])
        real_BT = upload(scored.rollout.mask_BT & sampled_B[:, None], logp_BT.device)
        numbers = measure_teacher(scored.old_logp_BT, logp_BT, real_BT)
        if self._settings.into == "loss":
            return Advantages(None, numbers)
        coef, clamp = self._settings.coef, self._settings.clamp
        return Advantages(teacher_advantages(scored.old_logp_BT, logp_BT, coef, clamp), numbers)

    @torch.no_grad()
    def read(self, rollout: Rollout, old_logp_BT: Tensor) -> tuple[Tensor, dict[int, NextTokens]]:
        """Return the teachers' log-probabilities of a rollout, [B, T]. With `teacher.into` loss also return
        distributions by row, in host memory. All are at the sampling temperature, for rows that are part of the loss.
        `old_logp_BT` is on the policy's device. Collective."""
        logp_BT, found = torch.zeros_like(old_logp_BT), dict[int, NextTokens]()
        for teacher in self._teachers:
            read = [teacher.reads(prompt) if teacher.teaches(prompt) else [] for prompt in rollout.prompts]
            prompt_ids = [ids for ids in read for _ in range(rollout.num_generations)]
            rows = [row for row in rollout.learned if prompt_ids[row]]
            found |= self._read_rows(teacher, rollout, prompt_ids, rows, logp_BT)
            if len(self._teachers) > 1 and isinstance(teacher.engine, engines.OffloadedModel):
                teacher.engine.release()
        return logp_BT, found

    def _read_rows(
        self, teacher: TeacherModel, rollout: Rollout, prompt_ids: list[list[int]], rows: list[int], logp_BT: Tensor
    ) -> dict[int, NextTokens]:
        """Write a teacher's log-probabilities of the policy's tokens into `logp_BT`; see `read`. Collective."""
        head: HeadFunction | None = None
        if self._settings.into == "loss":
            head = partial(most_likely, vocabulary=self._vocabulary, top_k=self._settings.top_k)
        found: dict[int, NextTokens] = {}
        token_rows = [
            replace(row, prompt=prompt_ids[row.index], sidecars=without(row.sidecars, Routing))
            for row in rollout.token_rows(rows)
        ]
        for micro in self._policy.micro_batches(token_rows, gradients=False):
            logp_N, _, *kept = teacher.engine(*teacher.seen(micro).inputs, self._temperature, head)
            if not micro.rows:
                continue
            logp_BT[micro.row_b, : micro.mask_bT.shape[1]] = micro.unflatten(logp_N)
            if kept:
                next_tokens = NextTokens(kept[0], kept[1] if kept[1:] else None, self._vocabulary)
                lengths = [rollout.lengths[row] for row in micro.rows]
                found.update(zip(micro.rows, next_tokens.split(lengths), strict=True))
        return found

    def loss(self, batch: TrainBatch) -> LossTerm | None:
        """Return the divergence between the policy and the teacher at the completion tokens of a micro-batch, which the
        head computes; None unless `teacher.into` is `loss`. Without rows, what the head computes has no meaning."""
        if not self._next_tokens:
            return None
        of_rows = [self._next_tokens[row] for row in batch.micro.rows]
        filler = next(iter(self._next_tokens.values())).first()
        teacher = NextTokens.joined(of_rows or [filler], batch.micro.mask_bT.device)
        head = partial(head_divergence, teacher=teacher, divergence=self._divergence)
        return LossTerm(partial(self._mean_divergence, batch), head)

    def _mean_divergence(
        self, batch: TrainBatch, logp_bT: Tensor, entropy_bT: Tensor, found: Sequence[Tensor]
    ) -> tuple[Tensor, Numbers]:
        real_bT = batch.weight_bT > 0
        value_bT, tokens = torch.where(real_bT, found[0], 0.0), real_bT.sum()
        mean = value_bT.detach().sum() / tokens.clamp(min=1)
        loss = teacher_loss(value_bT, batch.weight_bT, self._settings.coef, self._settings.clamp)
        return loss, {"teacher/loss": (mean, tokens)}


def measure_teacher(old_logp_BT: Tensor, teacher_logp_BT: Tensor, mask_BT: Tensor) -> Numbers:
    """Return the teacher's mean log-probability of the sampled tokens, and the mean of `old_logp` minus the teacher's.
    The latter is an unbiased estimate of KL(policy || teacher) for the policy that sampled."""
    tokens = mask_BT.sum()
    teacher, policy = (torch.where(mask_BT, logp_BT, 0.0).sum() / tokens for logp_BT in (teacher_logp_BT, old_logp_BT))
    return {"teacher/logp": (teacher, tokens), "teacher/kl": (policy - teacher, tokens)}


def teacher_advantages(old_logp_BT: Tensor, teacher_logp_BT: Tensor, coef: float, clamp: float | None = None) -> Tensor:
    """Return -coef (old_logp - teacher_logp), [B, T], a term of the advantages; see the module's docstring. `clamp` is
    the limit of the absolute difference, in nats."""
    gap_BT = old_logp_BT - teacher_logp_BT
    return -coef * (gap_BT if clamp is None else gap_BT.clamp(-clamp, clamp))


def teacher_loss(value_bT: Tensor, weight_bT: Tensor, coef: float, clamp: float | None = None) -> Tensor:
    """Return `coef` times the weighted sum of the divergences in a micro-batch, a scalar.

    Args:
        value_bT: the divergence at each token, with gradient.
        weight_bT: see `token_weights`; the caller chose the denominator.
        coef: the weight of this loss, relative to the loss of the policy.
        clamp: limit of the divergence of a token, in nats. Tokens above it have no gradient.
    """
    return coef * ((value_bT if clamp is None else value_bT.clamp(max=clamp)) * weight_bT).sum()
