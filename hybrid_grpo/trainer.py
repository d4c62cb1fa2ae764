"""GRPO, step by step: sample groups, score them, compare within the group, improve the policy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch
from torch import Tensor

from hybrid_grpo.config import BatchPlan, TrainConfig
from hybrid_grpo.data.batch import MicroBatch, Prompt, Rollout, Scores, TrainBatch
from hybrid_grpo.data.loader import PromptLoader, rank_share
from hybrid_grpo.data.packing import pack
from hybrid_grpo.distributed import all_reduce, rank, world_size
from hybrid_grpo.generation import OnFinish
from hybrid_grpo.metrics import Meter
from hybrid_grpo.monitor import measure_eval, measure_loss, measure_memory, measure_parity, measure_rollout
from hybrid_grpo.objective import policy_loss, token_weights
from hybrid_grpo.policy import Policy
from hybrid_grpo.reference import Reference
from hybrid_grpo.rewards.advantages import group_advantages
from hybrid_grpo.rewards.streaming import Stream
from hybrid_grpo.run import Run
from hybrid_grpo.sinks import Log
from hybrid_grpo.task import Task


class Trainer:
    """One rank's part of a GRPO run.

    Args:
        config, plan: the run's settings and batch equation.
        policy: what is trained.
        reference: what it is held close to; None when beta is 0.
        task: prompts and rewards.
        device: this rank's.
    """

    def __init__(
        self,
        config: TrainConfig,
        plan: BatchPlan,
        policy: Policy,
        reference: Reference | None,
        task: Task,
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
        self.loader = PromptLoader(
            task.prompts,
            config.rollout.prompts_per_step // plan.num_minibatches,
            rank(),
            world_size(),
            config.run.seed,
            config.data.shuffle,
        )
        self.last_rollout: tuple[Rollout, Scores, Tensor] | None = None

    def run(self, run: Run) -> None:
        """Train from the start or the newest checkpoint to the last step, evaluating on the way."""
        done = run.restore(self.policy, {"loader": self.loader})
        settings = {**asdict(self.config), "deepspeed": self.policy.deepspeed_config}
        with Log(self.config.log, run.folder, self.config.run.steps, done if run.resumes else -1, settings) as log:
            if self.task.eval_prompts and not run.resumes:
                self.evaluate()
                log.write(0, self.meter.reduce())

            def step(k: int) -> None:
                self.step(k)
                assert self.last_rollout is not None
                log.write_rollouts(k, *self.last_rollout)
                every = self.config.eval.every
                if self.task.eval_prompts and (k == self.config.run.steps or (every and k % every == 0)):
                    self.evaluate()

            run.loop(self.policy, {"loader": self.loader}, self.meter, step, log, done)

    def step(self, step: int) -> None:
        """One GRPO step (DeepSeekMath, arXiv:2402.03300, algorithm 1, inner loop)."""
        with self.meter.time("time/step_s"):
            prompts = self.draw_prompts()
            with Stream(self.task.rewards, prompts, self.plan.num_generations) as stream:
                rollout = self.sample(prompts, step, stream.add)
                scores = self.score(stream)
            advantages_B = group_advantages(
                scores.reward_B, rollout.num_generations, self.config.grpo.scale_rewards
            ).to(self.device)
            ref_logp_BT = self.reference_logprobs(rollout)
            self.improve(rollout, advantages_B, ref_logp_BT)
        self.last_rollout = (rollout, scores, advantages_B)
        self.measure(step, rollout, scores)

    def draw_prompts(self) -> list[Prompt]:
        """This rank's prompts of the next rollout, minibatch after minibatch."""
        return [
            replace(prompt, epoch=epoch)
            for _ in range(self.plan.num_minibatches)
            for prompt, epoch in self.loader.next_batch()
        ]

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
        self.meter.add("throughput/generated_tokens_per_s", rollout.num_tokens / generate_s)
        return rollout

    def score(self, stream: Stream) -> Scores:
        """What the reward functions say of every completion; of most they have said it during sampling."""
        with self.meter.time("time/reward_wait_s"):
            scores = stream.scores()
        self.meter.add("time/reward_s", stream.seconds)
        return scores

    def reference_logprobs(self, rollout: Rollout) -> Tensor | None:
        """The reference's log-probabilities, once per rollout; None without a reference."""
        if self.reference is None:
            return None
        with self.meter.time("time/reference_s"):
            shape = (len(rollout.completions), _longest(rollout))
            batches = self.micro_batches(rollout, range(shape[0]))
            return self.reference.logprobs(batches, shape, self.config.rollout.temperature)

    def improve(self, rollout: Rollout, advantages_B: Tensor, ref_logp_BT: Tensor | None) -> None:
        """`num_iterations` passes of `num_minibatches` optimizer steps; `old_logp` stays that of the sampler."""
        start = time.perf_counter()
        old_logp_BT = _old_logp(rollout).to(self.device)
        rows = len(rollout.completions) // self.plan.num_minibatches
        passes = [
            (iteration, range(first, first + rows))
            for iteration in range(self.plan.num_iterations)
            for first in range(0, len(rollout.completions), rows)
        ]
        for number, (_, minibatch) in enumerate(passes):
            for batch in self.train_batches(rollout, minibatch, old_logp_BT, advantages_B, ref_logp_BT):
                loss, logp_bT = self.loss(batch, on_policy=number == 0)
                self.policy.engine.backward(loss)
                self.meter.add("policy/loss", loss / len(passes))
                if number == 0:
                    measure_parity(self.meter, batch.micro, logp_bT, batch.old_logp_bT)
            self.meter.add("policy/lr", self.policy.lr)
            self.meter.add("policy/grad_norm", self.policy.step().grad_norm)
        train_s = time.perf_counter() - start
        tokens = rollout.num_tokens + sum(len(prompt.token_ids) for prompt in rollout.row_prompts)
        self.meter.add("time/train_s", train_s)
        self.meter.add("throughput/trained_tokens_per_s", tokens * self.plan.num_iterations / train_s)

    def loss(self, batch: TrainBatch, on_policy: bool) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the objective, and the log-probabilities it was made of.

        Before the first optimizer step on a rollout the policy is the one that sampled, so its ratio is 1 by
        construction; the sampler's log-probabilities would add their rounding and nothing else. Unless they are to be
        those of the filtered distribution: then the policy is off it from the start.
        """
        grpo = self.config.grpo
        recorded = not on_policy or self.config.rollout.logprobs == "sampling"
        logp_bT, entropy_bT = self.policy.logprobs(batch.micro, self.config.rollout.temperature)
        loss, stats = policy_loss(
            logp_bT,
            batch.old_logp_bT if recorded else logp_bT.detach(),
            batch.advantages_b,
            batch.weight_bT,
            epsilon_low=grpo.epsilon_low,
            epsilon_high=grpo.epsilon_high,
            beta=grpo.beta,
            ref_logp_bT=batch.ref_logp_bT,
        )
        measure_loss(self.meter, stats, entropy_bT.detach(), batch.weight_bT, with_kl=grpo.beta != 0)
        return loss, logp_bT

    def micro_batches(self, rollout: Rollout, rows: range) -> list[MicroBatch]:
        """The given rows of a rollout within the token budget; as many on every rank."""
        return pack(
            [prompt.token_ids for prompt in rollout.row_prompts],
            [completion.token_ids for completion in rollout.completions],
            budget=self.plan.micro_batch_tokens,
            device=self.device,
            rows=rows,
        )

    def train_batches(
        self,
        rollout: Rollout,
        rows: range,
        old_logp_BT: Tensor,
        advantages_B: Tensor,
        ref_logp_BT: Tensor | None,
    ) -> Iterator[TrainBatch]:
        """The micro-batches of one optimizer step, weighted by its counts over all ranks."""
        local = sum(len(rollout.completions[row].token_ids) for row in rows)
        total_tokens = int(all_reduce(torch.tensor(local, device=self.device)))
        for micro in self.micro_batches(rollout, rows):
            weight_bT = token_weights(
                micro.mask_bT,
                self.config.grpo.loss_type,
                total_tokens=total_tokens,
                total_rows=self.plan.rows_per_minibatch,
                max_completion_tokens=self.config.rollout.max_completion_tokens,
            )
            b, tokens = micro.mask_bT.shape
            if not micro.rows:
                nothing = torch.zeros(b, tokens, device=self.device)
                yield TrainBatch(micro, nothing, nothing, nothing[:, 0], nothing)
                continue
            yield TrainBatch(
                micro,
                old_logp_BT[micro.rows, :tokens],
                None if ref_logp_BT is None else ref_logp_BT[micro.rows, :tokens],
                advantages_B[micro.rows],
                weight_bT,
            )

    def evaluate(self) -> None:
        """Greedy completions of the held-out prompts: accuracy and mean reward."""
        with self.meter.time("time/eval_s"):
            completions = self.policy.greedy(self.eval_prompts, self.config.rollout, self.task.stop_ids)
            scores = self.task.rewards.score(self.eval_prompts, completions)
        measure_eval(self.meter, self.config.eval, self.task.outcome, completions, scores)

    def measure(self, step: int, rollout: Rollout, scores: Scores) -> None:
        """Numbers of the step that its stages did not add."""
        measure_rollout(self.meter, rollout, scores, self.task.outcome, self.config.eval.threshold)
        measure_memory(self.meter)
        rows = self.config.rollout.prompts_per_step * rollout.num_generations
        self.meter.add("progress/completions", step * rows)
        self.meter.add("policy/skipped_steps", self.policy.skipped_steps)
        state = self.loader.state_dict()
        self.meter.add("data/epoch", state["epoch"] + state["offset"] / state["length"])


def _longest(rollout: Rollout) -> int:
    return max(len(completion.token_ids) for completion in rollout.completions)


def _old_logp(rollout: Rollout) -> Tensor:
    """Sampler log-probabilities, float32 [B, T], 0 on padding."""
    old_logp_BT = torch.zeros(len(rollout.completions), _longest(rollout))
    for row, completion in enumerate(rollout.completions):
        old_logp_BT[row, : len(completion.logp)] = torch.tensor(completion.logp)
    return old_logp_BT
