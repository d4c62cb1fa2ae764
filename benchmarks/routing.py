"""Routing replay in mixtures of experts: how many tokens training routes to other experts than the sampler did, and
what that does to their log-probabilities, with `policy.routing` free and replay; and what recording costs.

    python benchmarks/routing.py [--json FILE] [--only NAME ...]

Random models in bfloat16: two with the defaults of transformers' initialisation, which sample 64 completions, and a
tiny one of every type with experts that the paged decoder takes. The experts are seen by hooks on the modules that
compute them. `rollout_s` are the CPU seconds of the rollout with and without recording, the best of
three; `forward_s` those of the packed pass.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests/support"))

from architecture_proof import draw  # noqa: E402
from experts_used import differing, experts_used  # noqa: E402
from tiny_architectures import VARIANTS, tiny_architecture  # noqa: E402

from hybrid_grpo.data.batch import Completion  # noqa: E402
from hybrid_grpo.data.packing import pack  # noqa: E402
from hybrid_grpo.generation import Request, Sampling, generate, stream_key  # noqa: E402
from hybrid_grpo.model.architectures import unsupported  # noqa: E402
from hybrid_grpo.model.attention import ATTENTION  # noqa: E402
from hybrid_grpo.model.loading import without_dropout  # noqa: E402
from hybrid_grpo.model.logprobs import LogprobModel  # noqa: E402
from hybrid_grpo.model.routing import adopt_routers, joined  # noqa: E402

Row = tuple[list[int], Completion]
_SIZES = {
    **{"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128},
    **{"num_hidden_layers": 6, "num_attention_heads": 8, "num_experts_per_tok": 4, "max_position_embeddings": 1024},
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 16, "num_key_value_heads": 4, "head_dim": 32},
    "glm4_moe_lite": {
        **{"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_key_value_heads": 8, "q_lora_rank": 64},
        **{"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
    },
}


def rollout(view: Any, vocabulary: int, prompts: int, length: int, tokens: int) -> list[Row]:
    """Sample four completions of each of some random prompts."""
    rng = random.Random(0)
    texts = [[rng.randrange(vocabulary) for _ in range(length + i)] for i in range(prompts)]
    requests = [Request(p, [stream_key(1, 0, 0, i, k) for k in range(4)]) for i, p in enumerate(texts)]
    groups, _ = generate(view, requests, Sampling(tokens, temperature=1.0), max_slots=32)
    return [(prompt, completion) for prompt, group in zip(texts, groups, strict=True) for completion in group]


@torch.no_grad()
def training(model: LogprobModel, rows: list[Row], replays: bool) -> dict[str, float]:
    """Return the gap in log-probability of a packed pass, and the share of its tokens with other experts."""
    prompts, completions = [prompt for prompt, _ in rows], [completion for _, completion in rows]
    given = prompts, [c.token_ids for c in completions], range(len(rows)), 4096, torch.device("cpu")
    gaps, shares, sizes = [], [], []
    start = time.process_time()
    for micro in pack(*given, share="on", routing=[c.routing for c in completions], replays=replays):
        with experts_used(model) as used:
            logp_N, _ = model(*micro.inputs, 1.0)
        gaps.append((logp_N - torch.cat([torch.tensor(completions[row].logp) for row in micro.rows])).abs())
        shares.append(differing(used, _recorded(rows, micro.rows)))
        sizes.append(micro.input_ids_bS.shape[1])
    seconds = time.process_time() - start
    share = sum(share * size for share, size in zip(shares, sizes, strict=True)) / sum(sizes)
    gap_N = torch.cat(gaps)
    return {"differs": share, "gap_mean": float(gap_N.mean()), "gap_max": float(gap_N.max()), "forward_s": seconds}


def _recorded(rows: list[Row], numbers: list[int]) -> Any:
    """Return the recorded experts of a packed row: every prompt once, followed by its completions."""
    parts = []
    for place, number in enumerate(numbers):
        routing, (prompt, completion) = rows[number][1].routing, rows[number]
        assert routing is not None, "the sampler recorded no experts"
        if place == 0 or prompt != rows[numbers[place - 1]][0]:
            parts.append((routing.prompt, len(prompt)))
        parts.append((routing.completion, len(completion.token_ids) - 1))
    return joined(parts)


def compared(model: Any, vocabulary: int, *size: int) -> dict[str, Any]:
    """Return the results of a model, given its vocabulary and the arguments of `rollout`."""
    view = deepcopy(model).eval()
    rows = rollout(view, vocabulary, *size)
    assert adopt_routers(model), "its routers are not known"
    scored = LogprobModel(model)
    return {name: training(scored, rows, name == "replay") for name in ("free", "replay")}


def measured(name: str) -> dict[str, Any]:
    """Return the results of one of `MODELS`, with the seconds of its rollout with and without recording."""
    torch.manual_seed(0)
    config = without_dropout(AutoConfig.for_model(name, **(_SIZES | MODELS[name])))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).to(torch.bfloat16)
    size = 512, 16, 48, 96

    def seconds(view: Any) -> float:
        rollout(view, 512, 2, 8, 2)
        return min(_seconds(lambda: rollout(view, *size)) for _ in range(3))

    recording = seconds(deepcopy(model).eval())
    with mock.patch("hybrid_grpo.generation.cache.adopt_routers"):
        plain = seconds(deepcopy(model).eval())
    return {**compared(model, *size), "rollout_s": {"recorded": recording, "not recorded": plain}}


def _seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def of_type(name: str) -> dict[str, Any] | None:
    """Return the results of a tiny model of a type; None if it has no experts or the paged decoder refuses it."""
    with suppress(Exception):
        config = tiny_architecture(name)
        text = config.get_text_config()
        if unsupported(config) is None:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(without_dropout(config), attn_implementation=ATTENTION)
            if not any(part.split(".")[-1] == "experts" for part, _ in model.named_modules()):
                return None
            try:
                return compared(draw(model).to(torch.bfloat16), text.vocab_size, 4, 20, 24)
            except Exception as error:
                return {"wrong": " ".join(f"{type(error).__name__}: {error}".split())[:120]}
    return None


def rounded(result: Any) -> Any:
    """Return the result with three significant digits."""
    if isinstance(result, dict):
        return {name: rounded(value) for name, value in result.items()}
    return float(f"{result:.3g}") if isinstance(result, float) else result


def main() -> None:
    """Measure, print, and write FILE."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", help="model types; default: all")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    names = arguments.only or [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS]
    found: dict[str, Any] = {"models": {}, "types": {}}
    for group, measure, of in (("models", measured, [n for n in MODELS if n in names]), ("types", of_type, names)):
        for name in of:
            if (result := measure(name)) is not None:  # type: ignore[operator]
                found[group][name] = rounded(result)
                print(name, json.dumps(found[group][name]), flush=True)
    machine = {"transformers": transformers.__version__, "torch": torch.__version__, "device": "CPU"}
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
