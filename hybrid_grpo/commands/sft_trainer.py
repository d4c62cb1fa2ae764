"""Supervised fine-tuning on pairs of prompt and completion, usually before RL, with the same engine as GRPO."""

import time

import torch

from hybrid_grpo.commands.pairs import Pair
from hybrid_grpo.config import SftConfig
from hybrid_grpo.data.loader import PromptLoader
from hybrid_grpo.distributed.ranks import rank, world_size
from hybrid_grpo.policy import Policy
from hybrid_grpo.records.metrics.measurements import measure_machine
from hybrid_grpo.records.metrics.meter import Meter
from hybrid_grpo.run.stage import RunServices, Stage


class SftTrainer(Stage):
    """One rank's part of a supervised run: next-token cross-entropy on the completions, averaged over tokens."""

    policy: Policy

    def __init__(
        self, config: SftConfig, policy: Policy, pairs: list[Pair], device: torch.device,
        services: RunServices | None = None,
    ) -> None:  # fmt: skip
        super().__init__(policy, Meter(device), services=services)
        self.config, self.device = config, device
        self.loader = PromptLoader(
            pairs, config.sft.batch_size, rank(), world_size(), config.run.seed, config.data.shuffle
        )
        self.parts = {"loader": self.loader}

    def step(self, step: int) -> None:
        """Make one optimizer step on the next batch of pairs."""
        self.progress.enter("update", step)
        start = time.perf_counter()
        pairs = [pair for pair, _ in self.loader.next_batch()]
        tokens = sum(len(pair.completion_ids) for pair in pairs)
        prompt_ids, completion_ids = [p.prompt.token_ids for p in pairs], [p.completion_ids for p in pairs]
        for loss, count in self.policy.accumulate_sft_gradient(prompt_ids, completion_ids, self.progress.heartbeat):
            self.meter.add("sft/loss", loss, count)
        self.step_optimizer()
        self.meter.add("policy/skipped_steps", self.policy.skipped_steps)
        self.meter.add("sft/tokens", tokens)
        step_s = time.perf_counter() - start
        self.meter.add("time/step_s", step_s)
        read = tokens + sum(len(pair.prompt.token_ids) for pair in pairs)
        self.meter.add("throughput/trained_tokens_per_s", read / step_s)
        self.meter.update(measure_machine())
