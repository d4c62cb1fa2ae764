"""What `rollout.logprobs: mask` costs, and how far ratios are from 1 on policy without it and with it.

    python benchmarks/mask.py [--repeats 3] [--json [FILE]]

A random model samples completions with each filter and each value of `rollout.logprobs`, interleaved, with equal random
streams. Its head is scaled so that distributions are about as sharp as those of a language model; `uniform` is the
worst case, in which filters leave most of the vocabulary. Then the training forward scores the completions. A ratio is
that of the training forward to the distribution that tokens were drawn from: `sampling` records that distribution,
`softmax` does not. `rounding` is the same for the whole softmax and what it records, which no filter affects. The head
is timed alone, forward and backward, with these supports and with the whole vocabulary. Seconds are of processor time,
the least of the repeats, since other programs may use the cores.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from hybrid_grpo.data.batch import Completion, MicroBatch
from hybrid_grpo.data.packing import pack
from hybrid_grpo.generation import Request, Sampling, generate, stream_key
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.logprobs import LogprobModel, token_logprobs

FILE = Path(__file__).parent / "results" / "mask.json"
VOCABULARY, HIDDEN, LENGTH = 32_000, 256, 32
FILTERS: dict[str, dict[str, Any]] = {
    "top_p 0.9": {"top_p": 0.9},
    "top_k 5": {"top_k": 5},
    "min_p 0.1": {"min_p": 0.1},
}
MODES = ("softmax", "sampling", "mask")
PROMPTS = [[7, 11, row] for row in range(16)]
CPU = torch.device("cpu")


def build(scale: float) -> Any:
    """A random model; `scale` multiplies its head."""
    torch.manual_seed(0)
    config = Qwen2Config(
        **{"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_hidden_layers": 4},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
    )
    model = Qwen2ForCausalLM._from_config(config, attn_implementation=ATTENTION).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    return model


def sample(model: Any, sampling: Sampling) -> list[Completion]:
    """Two completions of every prompt."""
    requests = [Request(ids, [stream_key(row, k) for k in range(2)]) for row, ids in enumerate(PROMPTS)]
    groups, _ = generate(model, requests, sampling)
    return [completion for group in groups for completion in group]


def micro_batch(rows: list[Completion]) -> MicroBatch:
    prompts, ids = [ids for ids in PROMPTS for _ in range(2)], [row.token_ids for row in rows]
    (micro,) = pack(prompts, ids, range(len(rows)), 1 << 20, CPU, share="on", supports=[row.support for row in rows])
    return micro


@torch.no_grad()
def deviation(model: Any, rows: list[Completion], drawn: list[Completion]) -> float:
    """The largest |ratio - 1|; `drawn` are the same completions, with the probabilities that they were drawn with."""
    assert [row.token_ids for row in rows] == [row.token_ids for row in drawn]
    micro = micro_batch(rows)
    logp_bT = micro.unflatten(LogprobModel(model)(*micro.inputs, 1.0)[0])
    by_row = dict(zip(micro.rows, logp_bT, strict=True))
    ratios = [(by_row[k] - torch.tensor(row.logp)).exp() for k, row in enumerate(drawn)]
    return max(float((ratio - 1).abs().max()) for ratio in ratios)


def head_seconds(model: Any, rows: list[Completion]) -> tuple[float, float, float]:
    """Seconds of the head's forward and backward with supports and over the whole vocabulary, and of what making a
    micro-batch takes longer with supports."""
    seconds = []
    for supported in (True, False):
        start = time.process_time()
        micro = micro_batch(rows if supported else [replace(row, support=None) for row in rows])
        made = time.process_time()
        hidden_ND = torch.randn(len(micro.target_N), HIDDEN).requires_grad_()
        given = hidden_ND, model.lm_head.weight, None, micro.target_N
        token_logprobs(*given, support=micro.support)[0].sum().backward()
        seconds.append((made - start, time.process_time() - made))
    (with_supports, masked), (without, whole) = seconds
    return masked, whole, with_supports - without


def measured(model: Any, filters: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Times, sizes and ratios with one filter."""
    sampling = {mode: Sampling(LENGTH, logprobs=mode, **filters) for mode in MODES}  # type: ignore[arg-type]
    rows: dict[str, list[Completion]] = {}
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    heads = []
    for repeat in range(1 + repeats):
        for mode in MODES:
            start = time.process_time()
            rows[mode] = sample(model, sampling[mode])
            seconds[mode] += [time.process_time() - start] if repeat else []
        heads += [head_seconds(model, rows["mask"])] if repeat else []
    sizes = np.concatenate([row.support.count_N for row in rows["mask"] if row.support is not None])
    micro = micro_batch(rows["mask"])
    assert micro.support is not None
    masked, whole, columns = (min(of_repeats) for of_repeats in zip(*heads, strict=True))
    return {
        "support": {"mean": float(sizes.mean()), "median": float(np.median(sizes)), "largest": int(sizes.max())},
        "columns_of_the_head": len(micro.support.id_U),
        "rollout_s": {mode: min(seconds[mode]) for mode in MODES},
        "head_s": {"mask": masked, "softmax": whole},
        "columns_s": columns,
        "largest_ratio_deviation": {mode: deviation(model, rows[mode], rows["sampling"]) for mode in MODES},
        "rounding": deviation(model, rows["softmax"], rows["softmax"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, nargs="?", const=FILE)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = {name: (20.0, filters) for name, filters in FILTERS.items()} | {"uniform, top_p 0.9": (1.0, {"top_p": 0.9})}
    results = {}
    for name, (scale, filters) in cases.items():
        results[name] = measured(build(scale), filters, arguments.repeats)
        print(f"{name}: {json.dumps(results[name])}", flush=True)
    if arguments.json:
        sizes = {"vocabulary": VOCABULARY, "hidden": HIDDEN, "completions": 2 * len(PROMPTS), "tokens_each": LENGTH}
        machine = {"device": "cpu", "threads": 1, "torch": torch.__version__}
        text = json.dumps({"machine": machine, "sizes": sizes, "cases": results}, indent=1)
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
