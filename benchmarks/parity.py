"""How far the log-probabilities of the sampler are from those of the training forward, by length and by accident.

    python benchmarks/parity.py [--only qwen3,lfm2] [--tokens 2000] [--rollouts 200] [--json FILE]

`length`: for tiny models of several families, 8 completions of `--tokens` sampled tokens; the gap in nats is given by
position in the completion, in float32 and in bfloat16. `rollouts`: for the families with states, in float32, random
rollouts of groups of several turns, whose answers come late, in a cache so small that sequences are put back; the
largest gap of any token from a forward over its sequence alone, and what transformers' own decoding of that sequence,
token by token, differs from that forward.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support")]

from tiny_models import STATES, pair, tiny_config  # noqa: E402

from hybrid_grpo.data.packing import pack  # noqa: E402
from hybrid_grpo.generation import Request, Sampling, Stats, generate, stream_key  # noqa: E402
from hybrid_grpo.generation.cache import Geometry, cache_keyword  # noqa: E402
from hybrid_grpo.generation.loop import PAGE  # noqa: E402
from hybrid_grpo.generation.state_pool import rows_for  # noqa: E402
from hybrid_grpo.model.attention import ATTENTION  # noqa: E402
from hybrid_grpo.model.logprobs import LogprobModel  # noqa: E402
from hybrid_grpo.model.states import install_state_functions  # noqa: E402

DELTA = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip
MAMBA = {
    "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 32, "n_groups": 2, "chunk_size": 64, "head_dim": 32,
    "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "qwen3_5_text": DELTA,
    "nemotron_h": MAMBA,
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_ff_dim": 256},
    "falcon_h1": {
        "mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1,
        "head_dim": 32,
    },
}  # fmt: skip
BINS = (10, 100, 500, 1000, 2000)
MACHINE = f"{os.cpu_count()} CPU cores, torch {torch.__version__}"


def config_of(family: str) -> Any:
    sizes = {"max_position_embeddings": 4096, "initializer_range": 0.08}
    return tiny_config(family, 128, 4, **(sizes | FAMILIES[family]))


def random_model(family: str, dtype: torch.dtype) -> Any:
    """A model whose weights are drawn as the family initializes them: larger ones would be chaotic over thousands of
    tokens."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(family), attn_implementation=ATTENTION, dtype=dtype).eval()


def gaps_by_position(family: str, dtype: torch.dtype, tokens: int) -> Tensor:
    """|sampler - training forward| of 8 completions, [8, tokens]: two groups that share a prompt."""
    model = random_model(family, dtype)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], list(range(40))]
    requests = [Request(ids, [stream_key(row, k) for k in range(4)]) for row, ids in enumerate(prompts)]
    groups, _ = generate(model, requests, Sampling(tokens))
    completions = [completion for group in groups for completion in group]
    scored = LogprobModel(model)
    gaps = torch.zeros(len(completions), tokens)
    with torch.no_grad():
        for row, completion in enumerate(completions):
            prompt = prompts[row // 4]
            for micro in pack([prompt], [completion.token_ids], [0], 2 * tokens + 99, torch.device("cpu"), share="on"):
                logp_N, _ = scored(*micro.inputs, 1.0)
                gaps[row] = (logp_N - torch.tensor(completion.logp)).abs()
    return gaps


def by_length(families: list[str], tokens: int) -> dict[str, Any]:
    bounds = [*(end for end in BINS if end < tokens), tokens]
    found: dict[str, Any] = {}
    for family, dtype in itertools.product(families, (torch.float32, torch.bfloat16)):
        gaps = gaps_by_position(family, dtype, tokens)
        parts = {f"{low + 1}-{end}": gaps[:, low:end] for low, end in itertools.pairwise([0, *bounds])}
        name = str(dtype).removeprefix("torch.")
        found[f"{family} {name}"] = {
            part: {"mean": float(f"{gap.mean():.2g}"), "max": float(f"{gap.max():.2g}")} for part, gap in parts.items()
        }
        shown = (f"{part} {gap['mean']:.1e} ({gap['max']:.1e})" for part, gap in found[f"{family} {name}"].items())
        print(f"{family:14}{name:10}", *shown, flush=True)
    return found


class Answers:
    """Answers of random length to random turns, that come when they like; see `generation.sequence.Turns`."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self._random, self._vocabulary = random.Random(seed), vocabulary
        self._waiting: dict[int, int] = {}

    def begin(self, requests: Any) -> None:
        self._waiting.clear()

    def ended(self, key: int, turn_ids: list[int], room: int) -> str | None:
        if room <= 0 or self._random.random() < 0.2:
            return "length" if room <= 0 else "stop"
        self._waiting[key] = self._random.choice((0, 0, 1, 4, 20))
        return None

    def cut(self, key: int) -> str | None:
        return "length"

    def answers(self, patience_s: float) -> list[tuple[int, list[int]]]:
        if patience_s and self._waiting:
            self._waiting[next(iter(self._waiting))] = 0
        ready = [key for key, steps in self._waiting.items() if steps <= 0]
        self._waiting = {key: steps - 1 for key, steps in self._waiting.items() if key not in ready}
        drawn = (self._random.choice((1, 1, 2, 5, self._random.randint(1, 90))) for _ in ready)
        return [(key, self._random.choices(range(self._vocabulary), k=n)) for key, n in zip(ready, drawn, strict=True)]

    def finished(self, key: int, completion: Any) -> Any:
        return completion


def gap_of_rollout(plain: Any, view: Any, seed: int) -> tuple[float, Tensor, Stats]:
    """The largest gap of a random rollout, the sequence that it is in, and the statistics of the generation."""
    chance, vocabulary = random.Random(seed), plain.config.vocab_size
    prompts = [chance.choices(range(vocabulary), k=chance.choice((1, 2, 5, 70))) for _ in range(chance.randint(1, 4))]
    requests = [
        Request(ids, [stream_key(seed, row, k) for k in range(chance.randint(1, 4))], max_total_tokens=200)
        for row, ids in enumerate(prompts)
    ]
    stops = range(chance.choice((1, vocabulary // 20, vocabulary // 4)))
    sampling = Sampling(chance.choice((60, 190)), stop_ids=tuple(stops))
    slots = chance.randint(2, 8)
    memory = {"max_slots": slots, "cache_gb": tight_bytes(view, slots, chance.randint(0, 3)) / 2**30}
    groups, stats = generate(view, requests, sampling, turns=Answers(seed, vocabulary), decode=str, **memory)
    gaps = []
    for ids, group in zip(prompts, groups, strict=True):
        for completion in group:
            read_S = torch.tensor(ids + completion.read_ids)
            places = torch.tensor(completion.sampled_places or range(len(completion.token_ids))) + len(ids) - 1
            with torch.no_grad():
                logp_SV = plain(read_S[None], use_cache=False).logits[0].log_softmax(-1)
            logp_T = logp_SV[places, torch.tensor(completion.token_ids)]
            gaps.append((float((logp_T - torch.tensor(completion.logp)).abs().max()), read_S))
    return *max(gaps, key=lambda gap: gap[0]), stats


def gap_of_transformers(plain: Any, read_S: Tensor) -> float:
    """The largest gap between decoding a sequence token by token and a forward over it, both by transformers."""
    cache, rows = None, []
    with torch.no_grad():
        whole_SV = plain(read_S[None], use_cache=False).logits[0].log_softmax(-1)
        for place, token in enumerate(read_S):
            given = {cache_keyword(type(plain)): cache, "position_ids": torch.tensor([[place]]), "use_cache": True}
            out = plain(token[None, None], **given)
            cache = out.get("cache", out.get("past_key_values"))
            rows.append(out.logits[0, -1].log_softmax(-1))
    gaps_SV = (torch.stack(rows) - whole_SV).abs()
    return float(gaps_SV[:-1].gather(1, read_S[1:, None]).max())


def tight_bytes(view: Any, slots: int, more: int) -> int:
    """Bytes that hold the states of all slots, and the pages of one sequence of 200 tokens and a few `more`, so that
    others lose theirs. States get at most half."""
    geometry = Geometry.of(view)
    states = rows_for(slots, waiting=True) * geometry.state_bytes
    pages = (200 // PAGE["cpu"] + 4 + more) * PAGE["cpu"] * geometry.token_bytes
    return states + max(states, pages)


def by_accident(families: list[str], rollouts: int) -> dict[str, Any]:
    found = {}
    for family in families:
        plain, view = pair(family)
        install_state_functions(view)
        gaps, answers, preempted = [], 0, 0
        for seed in range(rollouts):
            gap, read_S, stats = gap_of_rollout(plain, view, seed)
            gaps.append((gap, seed, read_S))
            answers, preempted = answers + stats.answers, preempted + stats.preempted
        gaps.sort(key=lambda gap: gap[:2])
        found[family] = {
            "rollouts": rollouts, "largest_gap": gaps[-1][0], "median_gap": gaps[rollouts // 2][0],
            "largest_gap_of_transformers": gap_of_transformers(plain, gaps[-1][2]),
            "answers": answers, "preempted": preempted,
        }  # fmt: skip
        print(family, found[family], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(FAMILIES))
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rollouts", type=int, default=200, help=f"of each of {', '.join(STATES)}; 0 for none")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = {
        "command": " ".join(["python", *sys.argv]), "machine": MACHINE,
        "length": by_length(given.only.split(","), given.tokens) if given.tokens else {},
        "rollouts": by_accident(STATES, given.rollouts) if given.rollouts else {},
    }  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
