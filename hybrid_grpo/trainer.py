"""GRPO, step by step: sample groups, score them, compare within the group, improve the policy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch
from torch import Tensor

from hybrid_grpo.config import BatchPlan, TrainConfig
from hybrid_grpo.config.errors import RunStopped
from hybrid_grpo.data.batch import MicroBatch, Prompt, RewardStatus, Rollout, Scores, TrainBatch
from hybrid_grpo.data.curriculum import Curriculum
from hybrid_grpo.data.loader import rank_share
from hybrid_grpo.distributed import all_reduce, rank, world_size
from hybrid_grpo.generation import OnFinish
from hybrid_grpo.grpo.credit import mean_over_tokens, token_advantages
from hybrid_grpo.grpo.kl import KlController
from hybrid_grpo.grpo.loss import policy_loss, reward_kl, sampler_correction
from hybrid_grpo.grpo.minibatches import Signals, counting_rows, totals, train_batches
from hybrid_grpo.grpo.resampling import resample
from hybrid_grpo.policy import Policy
from hybrid_grpo.reference import Reference
from hybrid_grpo.rewards.scoring import Stream
from hybrid_grpo.run.inputs import RunInputs
from hybrid_grpo.run.measure import (
    measure_correction,
    measure_eval,
    measure_health,
    measure_loss,
    measure_memory,
    measure_parity,
    measure_rollout,
)
from hybrid_grpo.run.metrics import Meter
from hybrid_grpo.run.run import Run, Stateful
from hybrid_grpo.run.sinks import Log


class Trainer:
    """One rank's part of a GRPO run.

    Args:
        config, plan: the run's settings and batch equation.
        policy: what is trained.
        reference: what it is held close to; None where beta is 0.
        task: prompts and rewards.
        device: this rank's.
    """

    def __init__(
        self,
        config: TrainConfig,
        plan: BatchPlan,
        policy: Policy,
        reference: Reference | None,
        task: RunInputs,
        device: torch.device,
    ) -> None:
        self.config = config
        self.plan = plan
        self.policy = policy
        self.reference = reference
        self.task = task
        self.device = device
        self.eval_prompts = rank_share(task.eval_prompts, rank(), world_size())
        self.meter = Meter(task.rewards.names, [config.eval.name], device)
        # A minibatch is a batch of the loader, so that its prompts do not depend on the number of ranks.
        self.loader = Curriculum(
            task.prompts,
            config.rollout.prompts_per_step // plan.num_minibatches,
            rank(),
            world_size(),
            config.run.seed,
            config.data.shuffle,
            config.curriculum,
            plan.num_generations,
            device,
        )
        self.kl = KlController(config.grpo, config.rollout.prompts_per_step * plan.num_generations, device)
        grpo, filtered = config.grpo, config.rollout.logprobs == "sampling"
        auto = filtered or grpo.sampler_correction != "none"
        self.recomputes = auto if grpo.old_logp == "auto" else grpo.old_logp == "policy"
        # The filtered distribution is not the policy's: with its log-probabilities no ratio is 1.
        self.starts_on_policy = self.recomputes or not filtered
        self.kl_in_reward = grpo.beta != 0 and grpo.kl_in == "reward"
        self.last_rollout: tuple[Rollout, Scores, Tensor] | None = None

    def run(self, run: Run) -> None:
        """Train from the start or the newest checkpoint to the last step, evaluating on the way."""
        parts: dict[str, Stateful] = {"loader": self.loader, "kl": self.kl}
        shards = self.reference if self.config.grpo.ref_every else None
        done = run.restore(self.policy, parts, shards)
        settings = {**asdict(self.config), "deepspeed": self.policy.deepspeed_config}
        with Log(self.config.log, run.folder, self.config.run.steps, done if run.resumes else -1, settings) as log:
            if self.task.eval_prompts and not run.resumes:
                self.refuse_failures(self.evaluate(0))
                log.write(0, run.watched(0, self.meter.reduce()))

            def step(k: int) -> None:
                try:
                    self.step(k)
                except RunStopped:
                    if self.last_rollout is not None:
                        log.write_rollouts(k, *self.last_rollout, always=True)
                    raise
                assert self.last_rollout is not None
                log.write_rollouts(k, *self.last_rollout)
                self.write_prompts(run, k)
                every = self.config.eval.every
                if self.task.eval_prompts and (k == self.config.run.steps or (every and k % every == 0)):
                    self.evaluate(k)

            run.loop(self.policy, parts, self.meter, step, log, done, shards)

    def step(self, step: int) -> None:
        """One GRPO step (DeepSeekMath, arXiv:2402.03300, algorithm 1, inner loop)."""
        with self.meter.time("time/step_s"):
            rollout, scores = self.collect(step)
            old_logp_BT = self.old_logprobs(rollout)
            ref_logp_BT = self.reference_logprobs(rollout)
            advantages_BT = self.advantages(rollout, scores, old_logp_BT, ref_logp_BT)
            self.improve(rollout, advantages_BT, old_logp_BT, ref_logp_BT)
            self.refresh_reference(step)
        self.last_rollout = (rollout, scores, mean_over_tokens(advantages_BT, rollout))
        self.measure(rollout, scores)

    def collect(self, step: int) -> tuple[Rollout, Scores]:
        """The step's groups and their scores; with dynamic sampling, groups that teach nothing are replaced."""
        rollout, scores = self.sample_and_score(self.draw_prompts(), step)
        if self.config.grpo.dynamic_sampling:
            rollout, scores = resample(
                rollout,
                scores,
                self.places(),
                draw=lambda count, wanted: _prompts(self.loader.draw(count, wanted)),
                sample=lambda prompts: self.sample_and_score(prompts, step),
                max_rounds=self.config.grpo.max_resamples,
                meter=self.meter,
                device=self.device,
            )
        self.loader.update()
        # Before anything is learned from it. It has no advantages yet.
        self.last_rollout = (rollout, scores, torch.full_like(scores.reward_B, torch.nan))
        self.refuse_failures(scores)
        return rollout, scores

    def refuse_failures(self, scores: Scores) -> None:
        """End the run, on all ranks alike, where a reward function fails too often. Collective.

        Raises:
            RunStopped: it does.
        """
        counts = [int((status_B >= RewardStatus.FAILED).sum()) for status_B in scores.status.values()]
        *failures, rows = all_reduce(torch.tensor([*counts, len(scores.reward_B)], device=self.device)).tolist()
        self.task.rewards.refuse_failures(dict(zip(scores.status, failures, strict=True)), rows)

    def places(self) -> list[int]:
        """Where the groups of this rank stand among those of all ranks, minibatch after minibatch."""
        share = self.plan.prompts_per_rank // self.plan.num_minibatches
        return [
            (minibatch * world_size() + rank()) * share + group
            for minibatch in range(self.plan.num_minibatches)
            for group in range(share)
        ]

    def sample_and_score(self, prompts: list[Prompt], step: int) -> tuple[Rollout, Scores]:
        """A rollout and what the reward functions say of it; there may be no prompts on this rank."""
        with self.task.rewards.stream(prompts, self.plan.num_generations, step) as stream:
            rollout = self.sample(prompts, step, stream.add)
            scores = self.score(stream)
        self.loader.note(prompts, scores.by_function[self.task.outcome], self.config.eval.threshold)
        return rollout, scores

    def draw_prompts(self) -> list[Prompt]:
        """This rank's prompts of the next rollout, minibatch after minibatch."""
        batches = [_prompts(self.loader.next_batch()) for _ in range(self.plan.num_minibatches)]
        return [prompt for batch in batches for prompt in batch]

    def sample(self, prompts: list[Prompt], step: int, on_finish: OnFinish | None = None) -> Rollout:
        """Complete every prompt `num_generations` times with the policy as it is."""
        start = time.perf_counter()
        rollout, _ = self.policy.rollout(
            prompts,
            self.config.rollout,
            self.task.stop_ids,
            seed=self.config.run.seed,
            step=step,
            on_finish=on_finish,
        )
        switch = self.policy.engine.switch_time
        generate_s = time.perf_counter() - start - switch.gather_s - switch.release_s
        self.meter.add("time/generate_s", generate_s)
        self.meter.add("time/gather_s", switch.gather_s)
        self.meter.add("time/switch_s", switch.gather_s + switch.release_s)
        self.meter.add("completion/sampled_tokens", rollout.num_tokens)
        return rollout

    def score(self, stream: Stream) -> Scores:
        """What the reward functions say of every completion; of most they have said it during sampling."""
        with self.meter.time("time/reward_wait_s"):
            scores = stream.scores()
        self.meter.add("time/reward_s", stream.seconds)
        return scores

    def old_logprobs(self, rollout: Rollout) -> Tensor | None:
        """[B, T], of the policy that sampled, once per rollout; None where nothing asks for them.

        The sampler recorded them, or one pass of the training forward gives them before the first optimizer step.
        """
        if not self.recomputes:
            return rollout.logp_BT.to(self.device)
        if len(self.passes(rollout)) == 1 and not self.kl_in_reward:
            return None
        with self.meter.time("time/old_logp_s"), torch.no_grad():
            logp_BT = torch.zeros(len(rollout.completions), max(rollout.lengths), device=self.device)
            for micro in self.micro_batches(rollout, range(len(rollout.completions)), gradients=False):
                logp_bT, _ = self.policy.logprobs(micro, self.config.rollout.temperature)
                if micro.rows:
                    logp_BT[micro.rows, : logp_bT.shape[1]] = logp_bT
        return logp_BT

    def reference_logprobs(self, rollout: Rollout) -> Tensor | None:
        """The reference's log-probabilities, once per rollout; None without a reference."""
        if self.reference is None:
            return None
        with self.meter.time("time/reference_s"):
            shape = (len(rollout.completions), max(rollout.lengths))
            batches = self.micro_batches(rollout, range(shape[0]), gradients=False)
            return self.reference.logprobs(batches, shape, self.config.rollout.temperature)

    def advantages(
        self, rollout: Rollout, scores: Scores, old_logp_BT: Tensor | None, ref_logp_BT: Tensor | None
    ) -> Tensor:
        """How much better every token was than the other completions of its group, float32 [B, T]."""
        kl_cost_B = None
        if self.kl_in_reward:
            assert old_logp_BT is not None and ref_logp_BT is not None
            mask_BT, estimator = rollout.mask_BT.to(self.device), self.config.grpo.kl_estimator
            kl_cost_B = self.kl.beta * reward_kl(old_logp_BT, ref_logp_BT, mask_BT, estimator).double().cpu()
        return token_advantages(rollout, scores, self.config, kl_cost_B, self.meter, self.device).to(self.device)

    def improve(
        self, rollout: Rollout, advantages_BT: Tensor, old_logp_BT: Tensor | None, ref_logp_BT: Tensor | None
    ) -> None:
        """`num_iterations` passes of `num_minibatches` optimizer steps; `old_logp` stays that of the sampler."""
        start = time.perf_counter()
        passes = self.passes(rollout)
        counts_B = counting_rows(rollout, self.config.grpo.mask_truncated).to(self.device)
        signals = Signals(rollout.logp_BT.to(self.device), old_logp_BT, ref_logp_BT, advantages_BT, counts_B)
        micro_batches = {rows: self.micro_batches(rollout, rows) for rows in dict.fromkeys(passes)}
        for number, rows in enumerate(passes):
            own = number == 0 and self.starts_on_policy
            given = replace(signals, old_logp_BT=None) if own else signals
            for batch in self.train_batches(rollout, rows, micro_batches[rows], given):
                loss, logp_bT = self.loss(batch)
                self.policy.engine.backward(loss)
                self.meter.add("policy/loss", loss / len(passes))
                if number == 0:
                    self.meter.update(measure_parity(batch.micro, logp_bT, batch.sampler_logp_bT))
            self.meter.add("policy/lr", self.policy.lr)
            self.meter.add("policy/grad_norm", self.policy.step().grad_norm)
        train_s = time.perf_counter() - start
        tokens = rollout.num_tokens + sum(len(prompt.token_ids) for prompt in rollout.row_prompts)
        self.meter.add("time/train_s", train_s)
        self.meter.add("throughput/trained_tokens_per_s", tokens * self.plan.num_iterations / train_s)
        if self.reference is not None:
            self.meter.add("policy/kl_coef", self.kl.beta)
            self.kl.update()

    def passes(self, rollout: Rollout) -> list[range]:
        """The rows of every optimizer step on a rollout."""
        rows = len(rollout.completions) // self.plan.num_minibatches
        minibatches = [range(first, first + rows) for first in range(0, len(rollout.completions), rows)]
        return minibatches * self.plan.num_iterations

    def loss(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the objective, and the log-probabilities it was made of.

        Before the first optimizer step on a rollout the policy is the one that sampled, so its ratio is 1 by
        construction; recorded log-probabilities would add their rounding and nothing else.
        """
        grpo = self.config.grpo
        logp_bT, entropy_bT = self.policy.logprobs(batch.micro, self.config.rollout.temperature)
        old_logp_bT = logp_bT.detach() if batch.old_logp_bT is None else batch.old_logp_bT
        correction_bT = None
        if grpo.sampler_correction != "none":
            correction_bT, correction = sampler_correction(
                old_logp_bT, batch.sampler_logp_bT, batch.weight_bT > 0, grpo
            )
            self.meter.update(measure_correction(correction))
        loss, stats = policy_loss(
            logp_bT,
            old_logp_bT,
            batch.advantages_bT,
            batch.weight_bT,
            grpo,
            beta=self.kl.beta,
            ref_logp_bT=batch.ref_logp_bT,
            entropy_bT=entropy_bT,
            correction_bT=correction_bT,
        )
        self.kl.add(stats)
        with_kl = batch.ref_logp_bT is not None
        self.meter.update(measure_loss(stats, entropy_bT.detach(), batch.weight_bT, with_kl))
        return loss, logp_bT

    def refresh_reference(self, step: int) -> None:
        """Every `ref_every` steps the reference follows the policy (iterative GRPO)."""
        grpo = self.config.grpo
        if self.reference is not None and grpo.ref_every and step % grpo.ref_every == 0:
            with self.meter.time("time/reference_s"):
                self.reference.refresh(self.policy.engine, grpo.ref_mix)

    def micro_batches(self, rollout: Rollout, rows: range, *, gradients: bool = True) -> list[MicroBatch]:
        """The given rows of a rollout within the token budget; as many on every rank."""
        return self.policy.micro_batches(
            [prompt.token_ids for prompt in rollout.row_prompts],
            [completion.token_ids for completion in rollout.completions],
            rows,
            gradients=gradients,
        )

    def train_batches(
        self, rollout: Rollout, rows: range, micro_batches: list[MicroBatch], signals: Signals
    ) -> Iterator[TrainBatch]:
        """The micro-batches of one optimizer step, weighted by its counts over all ranks."""
        return train_batches(
            micro_batches,
            signals,
            self.config.grpo.loss_type,
            totals=totals(rollout, signals.counts_B, rows),
            max_completion_tokens=self.config.rollout.max_completion_tokens,
        )

    def evaluate(self, step: int) -> Scores:
        """Greedy completions of the held-out prompts after a step: accuracy and mean reward. This rank's scores."""
        with self.meter.time("time/eval_s"):
            completions = self.policy.greedy(self.eval_prompts, self.config.rollout, self.task.stop_ids)
            scores = self.task.rewards.score(self.eval_prompts, completions, step=step)
        self.meter.update(measure_eval(self.config.eval, self.task.outcome, completions, scores))
        return scores

    def measure(self, rollout: Rollout, scores: Scores) -> None:
        """Numbers of the step that its stages did not add."""
        self.meter.update(measure_rollout(rollout, scores, self.task.outcome, self.config.eval.threshold))
        self.meter.update(measure_health(rollout, scores))
        self.meter.update(measure_memory())
        generated = self.meter.total("completion/sampled_tokens") / self.meter.total("time/generate_s")
        self.meter.add("throughput/generated_tokens_per_s", generated)
        self.meter.add("policy/skipped_steps", self.policy.skipped_steps)
        self.meter.add("data/epoch", self.loader.position / len(self.task.prompts))
        self.meter.add("progress/completions", self.loader.position * rollout.num_generations)
        self.loader.measure(self.meter)

    def write_prompts(self, run: Run, step: int) -> None:
        """Write prompts.jsonl, how often each prompt was solved, with every checkpoint and at the end."""
        every = self.config.checkpoint.every
        if rank() == 0 and (step == self.config.run.steps or (every and step % every == 0)):
            self.loader.write(run.folder / "prompts.jsonl")


def _prompts(drawn: list[tuple[Prompt, int]]) -> list[Prompt]:
    """The prompts, each with the epoch that it was drawn in."""
    return [replace(prompt, epoch=epoch) for prompt, epoch in drawn]
