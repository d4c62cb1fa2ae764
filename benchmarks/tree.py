"""What the tree of a micro-batch's rows saves: packing, forward and backward, beside rows that share whole prompts only
and rows that share nothing.

    python benchmarks/tree.py [--only smollm2,lfm2] [--repeats 5] [--json FILE]

`agents` are 8 episodes of one prompt of 512 tokens; each has 8 turns of 64 tokens, of which an agent reads 16, and
branches four ways: into two at the third turn, and each of these at the sixth. `group` are 8 prompts of 128 tokens with
4 completions as long, and in `apart` no row begins like another, where a tree must cost nothing. The ways take turns;
the numbers are medians, in seconds, on the cores that torch may use.
"""

import random
import sys
import time
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from machine import machine, parser_of, save
from parity import FAMILIES, random_model
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM

from hybrid_grpo.data.packing import pack
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.logprobs import LogprobModel
from hybrid_grpo.model.sidecars import TokenRow
from hybrid_grpo.model.states import install_state_functions

BUDGET, TURN, READ = 16_384, 64, 16
draw = random.Random(0)


def _text(tokens: int) -> list[int]:
    return [draw.randrange(60) for _ in range(tokens)]


def _agents() -> list[TokenRow]:
    prompt, rows = _text(512), list[TokenRow]()
    for _ in range(8):
        trunk = _text(2 * TURN)
        for half in (_text(3 * TURN), _text(3 * TURN)):
            for _ in range(2):
                # A sampled token is a target once, in the first row that has it.
                first = (0, 5, 2, 5)[len(rows) % 4] * TURN
                targets = [turn + k for turn in range(first, 8 * TURN, TURN) for k in range(READ, TURN)]
                rows.append(TokenRow(len(rows), prompt, trunk + half + _text(3 * TURN), targets))
    return rows


def _groups(prompts: int, size: int) -> list[TokenRow]:
    asked = [ids for ids in [_text(128) for _ in range(prompts)] for _ in range(size)]
    return TokenRow.of(asked, [_text(128) for _ in asked])


WORKLOADS = {"agents": _agents(), "group": _groups(8, 4), "apart": _groups(32, 1)}
WAYS: dict[str, tuple[Any, int]] = {"tree": ("auto", 8), "prompts": ("auto", sys.maxsize), "nothing": ("off", 8)}
"""What rows share, and the fewest tokens of a piece behind a prompt."""


def passes(model: Any, rows: list[TokenRow], share: Any, shortest: int) -> tuple[float, int]:
    """Seconds of a pass over all rows, and the tokens that it computes."""
    begin_s = time.perf_counter()
    with patch("hybrid_grpo.data.packing._SHORTEST", shortest):
        batches = pack(rows, BUDGET, torch.device("cpu"), share=share)
    for micro in batches:
        sum(scores.sum() for scores in LogprobModel(model)(*micro.inputs, 1.0)).backward()
    return time.perf_counter() - begin_s, sum(micro.input_ids_bS.numel() for micro in batches)


def _model(family: str) -> Any:
    """A model of a family of parity.py, or four of SmolLM2-135M's layers."""
    if family != "smollm2":
        return random_model(family, torch.float32)
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
    config = tiny_config("llama", 576, 4, max_position_embeddings=4096, **sizes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="smollm2," + ",".join(FAMILIES))
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(threads=torch.get_num_threads())}
    for family in arguments.only.split(","):
        model = _model(family).train()
        install_state_functions(model)
        for name, rows in WORKLOADS.items():
            ways = {way: partial(passes, model, rows, *options) for way, options in WAYS.items()}
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            tokens: dict[str, int] = {}
            for _ in range(arguments.repeats + 1):  # the first warms up
                for way, run in ways.items():
                    took, tokens[way] = run()
                    seconds[way].append(took)
            medians = {way: median(took[1:]) for way, took in seconds.items()}
            found[f"{family} {name}"] = {"tokens": tokens, "seconds": medians}
            times = ", ".join(f"{way} {medians[way]:.2f} s ({tokens[way]:,} tokens)" for way in ways)
            print(f"{family} {name}: {times}: {medians['nothing'] / medians['tree']:.2f}x", flush=True)
    save(arguments.json, found)


if __name__ == "__main__":
    main()
