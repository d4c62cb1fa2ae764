"""Proof that a model is decoded and trained as transformers computes it: a tiny random one, written and loaded.

The policy's side goes the way of `Policy` without its engine: weights are loaded with `ATTENTION`, a view of them is
decoded page by page, and their packed pass with shared prompts gives log-probabilities and gradients; or, for models
that cannot be packed, with `rollout.decoder: transformers` and padded rows. The other side is transformers alone:
`generate()`, and one plain forward for each completion.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from char_tokenizer import char_tokenizer
from tiny_architectures import VOCABULARY, tiny_architecture
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from hybrid_grpo.config import PolicyConfig, RolloutConfig
from hybrid_grpo.data.batch import MicroBatch
from hybrid_grpo.data.packing import pack, pad
from hybrid_grpo.generation import GREEDY, Request, Sampling, stream_key
from hybrid_grpo.generation.rollout import complete
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.export import Original
from hybrid_grpo.model.gathered_weights import View, meta_copy
from hybrid_grpo.model.loading import load_model
from hybrid_grpo.model.logprobs import LogprobModel
from hybrid_grpo.model.sidecars import TokenRow
from hybrid_grpo.model.towers import has_tower

PROMPTS = [1, 5, 12, 27]
"""Lengths of the prompts that are decoded."""
LIMIT = 12
"""Tokens of each completion that is decoded."""
LONG = (100, [30, 90, 75, 5])
"""Length of a prompt and of its completions that are trained on, but not decoded. The last two continue the one before
from its token 70 and from its token 140, as histories of an agent do."""
UNBOUNDED = ("nemotron_h", "zamba2")
"""Their `generate()` leaves out the bounds of Mamba 2's step sizes, which their forward has: tokens are compared with
those of the forward."""
CPU = torch.device("cpu")
Row = tuple[list[int], list[int]]
"""A prompt and a completion."""


@dataclass
class Gaps:
    """How far the policy is from transformers."""

    tokens: int
    """Greedily decoded tokens that are not those of `generate()`."""
    decoded: float
    """Largest difference of a log-probability recorded while decoding from that of a plain forward, in nats."""
    packed: float
    """The same for the training pass."""
    gradient: float
    """Largest relative difference of a parameter's gradient (L2)."""
    worst: str
    """The parameter with that difference."""
    without: list[str]
    """Parameters that get a gradient in one of the two passes only."""

    def faults(self, gradient: float = 1e-5) -> list[str]:
        """Return what is too far off, in words; `gradient` is the bound of its relative difference."""
        found = {
            f"{self.tokens} tokens differ from generate()": self.tokens,
            f"log-probabilities while decoding are {self.decoded:.1e} off": not self.decoded < 1e-4,
            f"log-probabilities in training are {self.packed:.1e} off": not self.packed < 1e-4,
            f"the gradient of {self.worst} is {self.gradient:.1e} off": not self.gradient < gradient,
            f"gradients of {', '.join(self.without)} are missing or new": self.without,
        }
        return [words for words, wrong in found.items() if wrong]


def prove(name: str, folder: Path, paged: bool = True) -> Gaps:
    """Return the gaps of a model type, or of one of `VARIANTS`. `folder` is where its tiny model is written; not
    `paged` means `rollout.decoder: transformers` and padded rows."""
    torch.manual_seed(0)
    config = tiny_architecture(name)
    auto: Any = AutoModelForImageTextToText if has_tower(config) else AutoModelForCausalLM
    model = draw(auto.from_config(config))
    model.save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    eager = {"attn_implementation": "eager", "dtype": torch.float32}
    plain = auto.from_pretrained(folder, **eager).eval()
    policy = load_model(PolicyConfig(model=str(folder), dtype="float32"), ATTENTION if paged else None)
    if has_tower(config):
        _check_export(plain, policy, folder)
    rows, tokens, decoded = _decoding(plain, policy, paged)
    expected = plain_pass(_scores(plain, *row) for row in rows)
    theirs = dict(gradients(plain))
    prompts, completions = ([list(part) for part in side] for side in zip(*rows, strict=True))
    make = partial(pack, share="on") if paged else pad
    found, mine = policy_pass(policy, make(TokenRow.of(prompts, completions), 400, CPU))
    packed = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    gradient, worst, without = gradient_gap(mine, theirs)
    return Gaps(tokens, decoded, packed, gradient, worst, without)


def _check_export(plain: Any, policy: Any, folder: Path) -> None:
    """Assert that a whole model, exported with all weights of its text negated, has these, and its own towers."""
    negated = {name: -tensor for name, tensor in policy.state_dict().items()}
    Original(policy, str(folder)).export(negated, folder / "exported")
    found = type(plain).from_pretrained(folder / "exported", dtype=torch.float32).state_dict()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(found[name], negated.get(name, tensor)), f"{name} is wrong in the export"


@torch.no_grad()
def draw(model: Any, seed: int = 0) -> Any:
    """Draw the weights of a model at random, larger than real ones, and return it."""
    generator = torch.Generator().manual_seed(seed)
    kinds = {id(p): type(module).__name__ for module in model.modules() for p in module.parameters(recurse=False)}
    saved = model.state_dict(keep_vars=True).items()
    for name, tensor in saved:
        # Of the buffers, those that balance experts are learned; others are tables of constants.
        if not (isinstance(tensor, nn.Parameter) or name.endswith("bias")) or not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() > 1 and isinstance(tensor, nn.Parameter):
            tensor.copy_(noise / tensor.shape[-1] ** 0.5)
        elif "Norm" in kinds.get(id(tensor), "") and not name.endswith("bias"):
            # Norms of either sign keep tied embeddings from repeating the last token. Some multiply by 1 + weight.
            tensor.copy_(noise.sign() - (0.0 if tensor.any() else 1.0))
        else:
            tensor.add_(0.2 * noise)
    return model


def _decoding(plain: Any, policy: Any, paged: bool) -> tuple[list[Row], int, float]:
    """Decode greedily and by sampling. Return the sampled rows and longer ones, the number of tokens that differ from
    those of `generate()`, and the largest difference of a log-probability."""
    view = View(policy, meta_copy(policy, policy.config._attn_implementation).eval(), False, CPU)
    view.gather()
    prompts = _texts(PROMPTS)
    # Sequences queue, leave and move; a prefill holds parts of several prompts.
    config = RolloutConfig(max_slots=5, prefill_tokens=20, decoder="paged" if paged else "transformers")
    different, gap, rows = 0, 0.0, []
    for samples, temperature in ((2, GREEDY), (3, 1.3)):
        requests = [Request(p, [stream_key(1, 0, 0, i, k) for k in range(samples)]) for i, p in enumerate(prompts)]
        sampling = Sampling(LIMIT, temperature=temperature)
        groups, _ = complete(view.module, char_tokenizer(), requests, sampling, config)
        for prompt, group in zip(prompts, groups, strict=True):
            if temperature == GREEDY:
                expected = _generated(plain, prompt)
                different += sum(a != b for c in group for a, b in zip(c.token_ids, expected, strict=True))
            else:
                rows += [(prompt, completion.token_ids) for completion in group]
            for c in group:
                divisor = temperature or 1.0
                with torch.no_grad():
                    logp = _scores(plain, prompt, c.token_ids, divisor)[0]
                gap = max(gap, float((torch.tensor(c.logp) - logp).abs().max()))
    length, lengths = LONG
    [prompt], completions = _texts([length], seed=1), _texts(lengths, seed=2)
    for number, branch in ((2, 70), (3, 140)):
        completions[number] = completions[number - 1][:branch] + completions[number]
    return rows + [(prompt, completion) for completion in completions], different, gap


def _texts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(6, VOCABULARY) for _ in range(length)] for length in lengths]


@torch.no_grad()
def _generated(plain: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    if plain.config.model_type in UNBOUNDED:
        for _ in range(LIMIT):
            ids = torch.cat([ids, plain(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        return ids[0, len(prompt) :].tolist()  # type: ignore[no-any-return]
    options = {"max_new_tokens": LIMIT, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    tokens: list[int] = plain.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
    return tokens


def _scores(plain: Any, prompt: list[int], completion: list[int], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of a completion by a plain forward of its row alone."""
    logits = plain(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    logp_TV = (logits.float() / temperature).log_softmax(-1)
    return logp_TV.gather(1, torch.tensor(completion)[:, None])[:, 0], -(logp_TV.exp() * logp_TV).sum(-1)


def weights_of(count: int, row: int) -> Tensor:
    """A weight of its own for each of a row's log-probabilities and entropies, [2, count]."""
    return torch.randn(2, count, generator=torch.Generator().manual_seed(row))


def plain_pass(scores: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return the log-probabilities of rows, of which these and their entropies are given, and add the gradients of
    their weighted sum."""
    logp = []
    for row, (logp_T, entropy_T) in enumerate(scores):
        (torch.stack([logp_T, entropy_T]) * weights_of(len(logp_T), row)).sum().backward()
        logp.append(logp_T.detach())
    return logp


def policy_pass(policy: Any, batches: list[MicroBatch]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same in training mode, of micro-batches that have all rows; and the gradients."""
    model, logp = LogprobModel(policy).train(), dict[int, Tensor]()
    for micro in batches:
        scores, lengths = torch.stack(model(*micro.inputs, 1.0)), micro.mask_bT.sum(1).tolist()
        weights = torch.cat([weights_of(n, row) for n, row in zip(lengths, micro.rows, strict=True)], dim=1)
        (scores * weights).sum().backward()
        logp |= zip(micro.rows, scores[0].detach().split(lengths), strict=True)
    return [logp[row] for row in sorted(logp)], dict(gradients(policy))


def gradients(model: Any) -> Iterator[tuple[str, Tensor]]:
    return ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None and p.grad.any())


def gradient_gap(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, str, list[str]]:
    # The gradient of a key's bias is zero but for rounding: differences count against a share of the largest too.
    least = 1e-2 * max(float(gradient.norm()) for gradient in theirs.values())
    rounding = {name for name, gradient in {**mine, **theirs}.items() if float(gradient.norm()) < 1e-4 * least}
    gaps = {
        name: float((mine[name] - theirs[name]).norm()) / max(float(theirs[name].norm()), least)
        for name in mine.keys() & theirs.keys()
    }
    worst = max(gaps, key=lambda name: gaps[name] if gaps[name] == gaps[name] else float("inf"))
    return gaps[worst], worst, sorted((mine.keys() ^ theirs.keys()) - rounding)


def as_numbers(gaps: Gaps) -> dict[str, Any]:
    """Return the gaps as they are written to JSON."""
    return {name: float(f"{v:.1e}") if isinstance(v, float) else v for name, v in asdict(gaps).items()}
