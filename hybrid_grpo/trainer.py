"""GRPO, step by step: sample groups, score them, compare within the group, improve the policy."""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybrid_grpo.config import BatchPlan, TrainConfig
from hybrid_grpo.data.batch import MicroBatch, Numbers, Prompt, Rollout, Scores, TrainBatch, measured
from hybrid_grpo.data.loader import StepLoader
from hybrid_grpo.distributed.ranks import exchange_objects, rank, reduced
from hybrid_grpo.generation import OnFinish
from hybrid_grpo.grpo.advantages import informative, mean_over_tokens, token_advantages
from hybrid_grpo.grpo.balance import Assignment, assign
from hybrid_grpo.grpo.baselines import path_variances
from hybrid_grpo.grpo.controllers import EntropyController, KlController
from hybrid_grpo.grpo.loss import learns_from_advantages_alone, micro_batch_loss, reward_kl
from hybrid_grpo.grpo.minibatches import Signals, optimizer_steps
from hybrid_grpo.grpo.resampling import group_slots, resample
from hybrid_grpo.grpo.selection import OldPolicy, select_tokens
from hybrid_grpo.model.logprobs import squared_probabilities
from hybrid_grpo.policy import Policy
from hybrid_grpo.records.metrics.measurements import (
    group_flops,
    measure_costs,
    measure_parity,
    measure_sampling,
    measure_step,
    sampling_spans,
)
from hybrid_grpo.records.metrics.meter import Meter
from hybrid_grpo.run.carry import Carry
from hybrid_grpo.run.evaluation import EvalSet
from hybrid_grpo.run.feature import Feature, Scored
from hybrid_grpo.run.inputs import RunInputs
from hybrid_grpo.run.reference import Reference
from hybrid_grpo.run.stage import RunServices, Stage


class Trainer(Stage):
    """One rank's part of a GRPO run.

    Args:
        config, plan, inputs: the run's settings, its batch equation, its prompts and rewards.
        policy, device: what is trained, and the device of this rank.
        reference: the model that the policy is kept close to; None if beta is 0.
        features: the extensions of GRPO, whose models are already loaded.
        services: see `Stage`.
    """

    policy: Policy

    def __init__(
        self, config: TrainConfig, plan: BatchPlan, policy: Policy, reference: Reference | None, inputs: RunInputs,
        device: torch.device, features: Sequence[Feature] = (), services: RunServices | None = None,
    ) -> None:  # fmt: skip
        super().__init__(policy, Meter(device), features, services)
        self.config, self.plan, self.device, self.reference, self.inputs = config, plan, device, reference, inputs
        self.eval_sets, self.partners, self.stop_ids = inputs.eval_sets, inputs.partners, inputs.stop_ids
        self.loader: StepLoader = inputs.training.loader(config, plan, device)
        self.kl = KlController(config.grpo, plan.rows, device)
        self.entropy = EntropyController(config.grpo, device)
        self.sum_over_ranks = partial(reduced, device=device)
        only_advantages = learns_from_advantages_alone(config.grpo, inputs.objective)
        can_skip_backward = only_advantages and not self.features.learn_beside_advantages
        self.max_over_ranks = partial(reduced, device=device, op="max") if can_skip_backward else None
        self.controllers = [of for of in (self.kl, self.entropy) if of.target is not None]
        self.parts = {"loader": self.loader, "kl": self.kl}
        if self.entropy.target is not None:
            self.parts["entropy"] = self.entropy
        self.exchange = partial(exchange_objects, device=device)
        self.carry: Carry | None = None
        if config.rollout.carry:
            self.carry = Carry(config.rollout, plan, inputs.training.prompts, self.exchange)
            self.parts["carry"] = self.carry
        self.reward_weights, self.recomputes_old_logp = config.reward_weights, config.recomputes_old_logp
        self.measures_old, self.starts_on_policy = config.grpo.measures_old, config.grpo.starts_on_policy
        self.shards = reference.engine if reference and config.grpo.ref_every else None
        self.shards_are_float32 = config.grpo.averages_reference

    def step(self, step: int) -> None:
        """One GRPO step (DeepSeekMath, arXiv:2402.03300, algorithm 1, inner loop)."""
        with self.meter.time("time/step_s"):
            rollout, scores = self.collect(step)
            if not self.skips(lambda: self.numbers_of(rollout, scores)):
                self.learn(rollout, scores)
            self.refresh_reference(step)
        self.measure(rollout, scores)

    def numbers_of(self, rollout: Rollout, scores: Scores) -> Numbers:
        """The metrics of a rollout and its scores."""
        own, inputs, threshold = self.plan.own_generations, self.inputs, self.config.eval.threshold
        measured = measure_step(rollout, scores, inputs.outcome, threshold, own)
        return measured | self.features.measure(rollout, scores)

    def learn(self, rollout: Rollout, scores: Scores) -> None:
        """Train the policy on a rollout and its scores, on the ranks that its groups are assigned to."""
        assignment = self.assigned(rollout, scores)
        trained, trained_scores = assignment.scatter(rollout, scores)
        self.policy.register_images(trained)
        old = self.old_policy(trained)
        ref_logp_BT = self.reference_logprobs(trained)
        advantages_BT = self.advantages(trained, trained_scores, old, ref_logp_BT)
        drifts_BT: Tensor | None = None
        if self.config.grpo.tokens != "all":
            selected = select_tokens(trained, advantages_BT, old, self.config.grpo, self.sum_over_ranks)
            advantages_BT, drifts_BT, numbers = selected
            self.meter.update(numbers)
        is_old_BT = None if trained.is_old_BT is None else trained.is_old_BT.to(self.device)
        logp_BT = trained.logp_BT.to(self.device)
        signals = Signals(logp_BT, old.logp_BT, ref_logp_BT, advantages_BT, is_old_BT, drifts_BT)
        with self.meter.time("time/train_s"):
            self.improve(trained, signals)
        advantages_BT = assignment.gather_tokens(advantages_BT, trained, rollout)
        self.last_rollout = (rollout, scores, mean_over_tokens(advantages_BT, rollout))
        self.last_advantages_BT = advantages_BT

    def assigned(self, rollout: Rollout, scores: Scores) -> Assignment:
        """Decide which rank trains on which groups, from their costs and rewards. Collective."""
        plan, (_, _, cost_P) = self.plan, group_flops(rollout, self.policy.cost)
        idle_P = ~informative(scores.reward_B, plan.num_generations, scores.steps) & (self.max_over_ranks is not None)
        cost_and_idle_R2P = torch.zeros(plan.world_size, 2, len(cost_P), dtype=torch.float64)
        cost_and_idle_R2P[rank()] = torch.stack([torch.from_numpy(cost_P).clamp(min=1), idle_P])
        cost_RP, idle_RP = self.sum_over_ranks(cost_and_idle_R2P).unbind(1)
        is_auto = self.config.grpo.balance == "auto"
        target_rank_RP, balance = assign(cost_RP, idle_RP.bool(), plan.num_minibatches, is_auto)
        if plan.world_size > 1:
            self.meter.add("throughput/balance", balance)
        return Assignment(target_rank_RP, plan.num_minibatches, rank(), self.exchange)

    def collect(self, step: int) -> tuple[Rollout, Scores]:
        """Return the step's rollout and its scores. With dynamic sampling, uninformative groups are replaced."""
        prompts = self.draw_prompts()
        if self.carry is not None:
            prompts = self.carry.begin(prompts, self.loader, step)
        rollout, scores = self.sample_and_score(prompts, step)
        if self.config.grpo.dynamic_sampling:
            plan = self.plan
            rollout, scores, numbers = resample(
                rollout, scores, group_slots(plan.prompts_per_rank, plan.num_minibatches, rank(), plan.world_size),
                slots=plan.world_size * plan.prompts_per_rank, sum_over_ranks=self.sum_over_ranks,
                draw=self.loader.more_prompts, sample=lambda prompts: self.sample_and_score(prompts, step),
                max_rounds=self.config.grpo.max_resamples,
            )  # fmt: skip
            self.meter.update(numbers)
        self.loader.update()
        self.progress.enter("old_logp")
        # Kept before anything is learned from it, in case the run stops here. It has no advantages yet.
        self.last_rollout, self.last_advantages_BT = (rollout, scores, scores.reward_B * torch.nan), None
        self.inputs.rewards.refuse_failures(scores, self.device)
        return rollout, scores

    def sample_and_score(self, prompts: list[Prompt], step: int) -> tuple[Rollout, Scores]:
        """Sample completions of `prompts`, which may be empty on this rank, and score them."""
        self.progress.enter("sampling", step)
        if self.partners is not None:
            prompts = self.partners.opened(prompts, step)
        with self.inputs.rewards.stream(prompts, self.plan.num_generations, step) as stream:
            rollout = self.sample(prompts, step, stream.add)
            self.progress.enter("scoring")
            with self.meter.time("time/reward_wait_s"):
                # Most functions have given their scores during sampling.
                scores = stream.scores(self.progress.stop_requested, self.carry.learned if self.carry else None)
            self.meter.add("time/reward_s", stream.seconds)
        if self.carry is not None:
            rollout, scores = self.carry.gather(rollout, scores)
        own = scores.first(self.plan.own_generations, self.plan.num_generations)
        self.loader.note(rollout.prompts, own.right_B(self.inputs.outcome, rollout.prompts), self.config.eval.threshold)
        return rollout, scores

    def draw_prompts(self) -> list[Prompt]:
        """Return this rank's prompts for the next rollout, ordered by minibatch."""
        return self.loader.next_prompts(self.plan.num_minibatches)

    def sample(self, prompts: list[Prompt], step: int, on_finish: OnFinish | None = None) -> Rollout:
        """Sample `num_generations` completions of every prompt from the current policy; features may supply some."""
        carry, off_policy = self.carry, self.features.write(prompts, step, self.progress.heartbeat)
        start = time.perf_counter()
        rollout, stats = self.policy.rollout(
            prompts, self.config.rollout, self.stop_ids, seed=self.config.run.seed, step=step,
            on_finish=on_finish if carry is None else carry.by_group(on_finish), on_step=self.progress.check_stop,
            given=off_policy, resumed_from=None if carry is None else carry.resumed_from,
            should_stop=None if carry is None else carry.should_stop,
        )  # fmt: skip
        self.meter.add_spans(spans := sampling_spans(start, self.policy.engine))
        if carry is not None:
            rollout = carry.end(rollout)
        captures = None if self.device.type == "cpu" else stats.captures
        self.meter.update(measure_sampling(rollout, spans, captures))
        if self.partners is not None:
            self.meter.update(self.partners.numbers(rollout))
        return rollout

    def old_policy(self, rollout: Rollout) -> OldPolicy:
        """Return what the rest of the step needs of the policy that sampled. Called once per rollout."""
        grpo = self.config.grpo
        if not self.measures_old:
            return OldPolicy(self.old_logprobs(rollout))
        # Rows that are not learned from may have no record of what filters left, and the others need theirs.
        rows = range(len(rollout.lengths)) if grpo.baseline == "optimal" else rollout.learned
        batches = self.micro_batches(rollout, rows, gradients=False)
        shape, temperature = (len(rollout.lengths), max(rollout.lengths)), self.config.rollout.temperature
        with self.meter.time("time/old_logp_s"):
            more = squared_probabilities if grpo.baseline == "optimal" else None
            return OldPolicy(*measured(self.policy.engine, batches, shape, temperature, more))

    def old_logprobs(self, rollout: Rollout) -> Tensor | None:
        """Return the log-probabilities [B, T] under the policy that sampled: those that the sampler recorded, or those
        of a training forward before the first optimizer step. None if nothing needs them. Called once per rollout."""
        if not self.recomputes_old_logp:
            return rollout.logp_BT.to(self.device)
        needs_it = self.kl.in_reward or self.features.needs_old_logp or self.config.grpo.tokens != "all"
        if self.plan.optimizer_steps == 1 and not needs_it:
            return None
        with self.meter.time("time/old_logp_s"):
            return self.scored(rollout, self.policy)

    def reference_logprobs(self, rollout: Rollout) -> Tensor | None:
        """Return log-probabilities [B, T] under the reference; None without one. Called once per rollout."""
        if self.reference is None:
            return None
        with self.meter.time("time/reference_s"):
            return self.scored(rollout, self.reference)

    def scored(self, rollout: Rollout, model: Policy | Reference) -> Tensor:
        """Return `model`'s log-probabilities [B, T] of the completions in the loss, without gradients. Collective."""
        batches = self.micro_batches(rollout, rollout.learned, gradients=False)
        return model.logprobs(batches, (len(rollout.lengths), max(rollout.lengths)), self.config.rollout.temperature)

    def advantages(self, rollout: Rollout, scores: Scores, old: OldPolicy, ref_logp_BT: Tensor | None) -> Tensor:
        """Return the advantages of tokens, float32 [B, T], in their group, plus the terms of features. Collective."""
        config, limit = self.config, self.config.rollout.max_completion_tokens
        beta, kl_BT = self.kl.beta, None
        if self.kl.in_reward:
            assert old.logp_BT is not None and ref_logp_BT is not None
            mask_BT = rollout.mask_BT.to(self.device)
            kl_BT = reward_kl(old.logp_BT, ref_logp_BT, mask_BT, config.grpo.kl_estimator)
        found = self.features.advantages(Scored(rollout, scores, old.logp_BT))
        variance_BT: Tensor | None = None
        if old.logp_BT is not None and old.squares_BT is not None:
            variance_BT = path_variances(old.logp_BT, old.squares_BT, rollout.mask_BT)
        advantages_BT, numbers = token_advantages(
            rollout, scores, config.grpo, limit, self.reward_weights, kl_BT, beta, self.sum_over_ranks, variance_BT
        )
        self.meter.update(numbers)
        for of in found:
            self.meter.update(of.numbers)
        terms = [of.value_BT for of in found if of.value_BT is not None]
        return sum(terms, start=advantages_BT.to(self.device))

    def improve(self, rollout: Rollout, signals: Signals) -> None:
        """Make `num_iterations` passes of `num_minibatches` optimizer steps, all with the `old_logp` of the rollout."""
        self.progress.enter("update")
        grpo = self.config.grpo if self.entropy.target is None else self.entropy.settings
        beta, objective = self.kl.beta, self.inputs.objective
        beat, temperature = self.progress.heartbeat, self.config.rollout.temperature
        for number, batches in enumerate(self.optimizer_steps(rollout, signals)):
            for batch in batches:
                beat()
                term = self.features.loss(batch)
                with torch.set_grad_enabled(batch.has_gradient):
                    logp_bT, entropy_bT, *found = self.policy.forward(batch.micro, temperature, term.head)
                    loss, numbers = micro_batch_loss(batch, logp_bT, entropy_bT, grpo, beta, objective)
                    added, of_term = term.value(logp_bT, entropy_bT, found)
                loss, numbers = loss + added, numbers | of_term
                if batch.has_gradient:
                    self.policy.engine.backward(loss)
                for controller in self.controllers:
                    controller.add(numbers)
                tokens = len(batch.micro.target_N) if batch.micro.rows else 0
                self.meter.update(numbers | {"policy/no_gradient_frac": (float(not batch.has_gradient), tokens)})
                self.meter.add("policy/loss", loss / self.plan.optimizer_steps)
                if number == 0:
                    self.meter.update(measure_parity(batch, logp_bT))
            self.step_optimizer()
        if self.reference is not None:
            self.meter.add("policy/kl_coef", self.kl.beta)
            self.kl.update(self.sum_over_ranks)
        if self.config.grpo.entropy_target is not None:
            self.meter.add("policy/entropy_coef", grpo.entropy_coef)
            self.entropy.update(self.sum_over_ranks)

    def optimizer_steps(self, rollout: Rollout, signals: Signals) -> Iterator[Iterator[TrainBatch]]:
        """Iterate over the optimizer steps on a rollout, each as its weighted micro-batches. Collective."""
        split, limit = partial(self.micro_batches, rollout), self.config.rollout.max_completion_tokens
        grpo, total, highest = self.config.grpo, self.sum_over_ranks, self.max_over_ranks
        return optimizer_steps(
            rollout, signals, split, grpo, limit, total, highest, starts_on_policy=self.starts_on_policy
        )

    def micro_batches(self, rollout: Rollout, rows: Sequence[int], *, gradients: bool = True) -> list[MicroBatch]:
        """Split rows into micro-batches within the token budget, the same number on every rank. Collective."""
        together = rollout.num_generations if self.config.grpo.whole_groups and gradients else 1
        return self.policy.micro_batches(rollout.token_rows(rows), gradients=gradients, together=together)

    def refresh_reference(self, step: int) -> None:
        """Move the reference toward the policy every `ref_every` steps (iterative GRPO)."""
        if (grpo := self.config.grpo).ref_every and self.reference is not None and step % grpo.ref_every == 0:
            with self.meter.time("time/reference_s"):
                self.reference.refresh(self.policy, grpo.ref_mix)

    def evaluate(self, step: int, sets: Sequence[EvalSet]) -> None:
        """Complete and score held-out sets after a step; see `EvalSet.measure`."""
        for held_out in sets:
            with self.meter.time("time/eval_s"):
                self.meter.update(held_out.measure(self.policy, step, self.progress.heartbeat))

    def tried_prompts(self) -> list[dict[str, Any]]:
        """How often each prompt was solved, hardest first."""
        return self.loader.tried_prompts()

    def measure(self, rollout: Rollout, scores: Scores) -> None:
        """Add the metrics of the step that its phases have not already added."""
        self.meter.update(self.numbers_of(rollout, scores) | self.loader.numbers())
        if self.carry is not None:
            self.meter.update(self.carry.numbers(rollout))
        self.meter.update(measure_costs(rollout, self.plan.num_iterations, self.policy, self.meter))
        self.meter.add("policy/skipped_steps", self.policy.skipped_steps)
