"""Trains a reward model on pairs of a better and a worse text, with the same engine as GRPO."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_grpo.commands.stages.preferences import Preference
from hybrid_grpo.config import RewardStageConfig
from hybrid_grpo.data.batch import MicroBatch, Numbers
from hybrid_grpo.data.loader import PromptLoader, rank_share
from hybrid_grpo.distributed.ranks import all_reduce, rank, world_size
from hybrid_grpo.model.upload import upload
from hybrid_grpo.policy import ScalarModelTrainer
from hybrid_grpo.records.metrics.measurements import measure_machine
from hybrid_grpo.records.metrics.meter import Meter
from hybrid_grpo.run.feature import Feature
from hybrid_grpo.run.stage import RunServices, Stage

_BINS = 10


def pair_losses(chosen_p: Tensor, rejected_p: Tensor, margin_p: Tensor, center: float) -> Tensor:
    """Return the loss of every pair of rewards, float32 [p], in nats.

    It is -log sigmoid(chosen - rejected - margin), the preference's negative log-likelihood by Bradley and Terry
    (Biometrika 39, 1952; margins as in Llama 2, arXiv:2307.09288, equation 2), plus `center` * (chosen + rejected)^2
    (arXiv:2312.09244, equation 2), since differences alone do not determine the level of the rewards.
    """
    return -F.logsigmoid(chosen_p - rejected_p - margin_p) + center * (chosen_p + rejected_p).square()


def calibration_bins(difference_p: Tensor) -> Tensor:
    """Return for 10 bins of confidence from 0.5 to 1 the numbers of pairs and right pairs, and the summed confidence.

    Shape [10, 3], float64. A pair is right if its better text has a higher reward; confidence is sigmoid(|difference|).
    """
    confidence_p = difference_p.double().abs().sigmoid()
    # NaN, from a model that has diverged, is counted too, so that the error becomes NaN.
    bin_p = ((confidence_p - 0.5) * 2 * _BINS).nan_to_num(0.0).long().clamp(max=_BINS - 1)
    facts_p3 = torch.stack([torch.ones_like(confidence_p), (difference_p > 0).double(), confidence_p], 1)
    return torch.zeros(_BINS, 3, dtype=torch.float64, device=difference_p.device).index_add(0, bin_p, facts_p3)


def calibration_error(bins_K3: Tensor) -> float:
    """Return the expected calibration error (arXiv:1706.04599, equation 3) from the sums of `calibration_bins`."""
    pairs, right_K, confidence_K = bins_K3[:, 0].sum(), bins_K3[:, 1], bins_K3[:, 2]
    return float((right_K - confidence_K).abs().sum() / pairs)


@dataclass(frozen=True)
class HeldOutPairs:
    """This rank's share of the held-out pairs, and the number of steps between evaluations on them."""

    every: int
    pairs: list[Preference]


class RewardTrainer(Stage):
    """One rank's part of training a reward model; `pairs` and `held_out` are the same on every rank."""

    policy: ScalarModelTrainer

    def __init__(
        self,
        config: RewardStageConfig,
        scorer: ScalarModelTrainer,
        pairs: list[Preference],
        held_out: list[Preference],
        device: torch.device,
        features: Sequence[Feature] = (),
        services: RunServices | None = None,
    ) -> None:
        super().__init__(scorer, Meter(device=device), features, services)
        self.config = config
        self.device = device
        self.loader = PromptLoader(
            pairs, config.reward.batch_size, rank(), world_size(), config.run.seed, config.data.shuffle
        )
        self.parts = {"loader": self.loader}
        mine = rank_share(held_out, rank(), world_size())
        self.eval_sets = [HeldOutPairs(config.eval.every, mine)] if held_out else []

    def step(self, step: int) -> None:
        """Make one optimizer step on the next batch of pairs."""
        self.progress.enter("update", step)
        start = time.perf_counter()
        pairs = [pair for pair, _ in self.loader.next_batch()]
        for micro in self.policy.pair_batches([pair.texts for pair in pairs]):
            self.progress.heartbeat()
            loss_p, chosen_p, rejected_p = self.compare(micro, pairs)
            self.policy.engine.backward(loss_p.sum() / self.config.reward.batch_size)
            self.meter.update(measure_pairs(loss_p, chosen_p, rejected_p))
        self.step_optimizer()
        self.meter.add("policy/skipped_steps", self.policy.skipped_steps)
        step_s = time.perf_counter() - start
        self.meter.add("time/step_s", step_s)
        tokens = sum(len(text) for pair in pairs for text in pair.texts)
        self.meter.add("throughput/trained_tokens_per_s", tokens / step_s)
        self.meter.update(measure_machine())

    def compare(self, micro: MicroBatch, pairs: list[Preference]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the losses and the chosen and rejected rewards of a micro-batch's pairs, float32 [p]. Collective."""
        # A filler row has a token, but belongs to no pair.
        score_N = self.policy.forward(micro)[: len(micro.rows)]
        chosen_p, rejected_p = score_N.view(-1, 2).unbind(1)
        margin_p = upload(np.array([pairs[row // 2].margin for row in micro.rows[::2]], np.float32), score_N.device)
        return pair_losses(chosen_p, rejected_p, margin_p, self.config.reward.center_coefficient), chosen_p, rejected_p

    @torch.no_grad()
    def evaluate(self, step: int, sets: Sequence[HeldOutPairs]) -> None:
        """Measure loss, accuracy and calibration error on the held-out pairs."""
        (held_out,) = sets
        bins_K3 = torch.zeros(_BINS, 3, dtype=torch.float64, device=self.device)
        with self.meter.time("time/eval_s"):
            for micro in self.policy.pair_batches([pair.texts for pair in held_out.pairs], gradients=False):
                self.progress.heartbeat()
                loss_p, chosen_p, rejected_p = self.compare(micro, held_out.pairs)
                bins_K3 += calibration_bins(chosen_p - rejected_p)
                numbers = measure_pairs(loss_p, chosen_p, rejected_p)
                self.meter.add("reward_model/heldout_loss", *numbers["reward_model/loss"])
                self.meter.add("reward_model/heldout_accuracy", *numbers["reward_model/train_accuracy"])
            self.meter.add("reward_model/heldout_calibration", calibration_error(all_reduce(bins_K3)))


def measure_pairs(loss_p: Tensor, chosen_p: Tensor, rejected_p: Tensor) -> Numbers:
    """Return the metrics of a micro-batch of pairs, each with the number of pairs that it averages."""
    count = len(loss_p)
    return {
        "reward_model/loss": (loss_p.detach().mean(), count),
        "reward_model/train_accuracy": ((chosen_p > rejected_p).double().mean(), count),
        "reward_model/margin_mean": ((chosen_p - rejected_p).detach().mean(), count),
        "reward_model/chosen_mean": (chosen_p.detach().mean(), count),
        "reward_model/rejected_mean": (rejected_p.detach().mean(), count),
    }
