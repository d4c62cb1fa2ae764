"""How far the log-probabilities of the sampler are from those of the training forward, by position.

    python benchmarks/parity.py [--only qwen3,lfm2] [--tokens 2000] [--json FILE]
    python benchmarks/parity.py --model FOLDER|FILE.gguf [--tokens 64] [--json FILE]

For tiny models of several families, 8 completions of `--tokens` sampled tokens; the gap in nats is given by position in
the completion, in float32 and in bfloat16. With `--model`, a real model completes 20 chats greedily: whether the tokens
are those of transformers' generate(), and how far its log-probabilities are from a plain forward of transformers.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from machine import machine, parser_of, save
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support")]

from tiny_models import tiny_config  # noqa: E402

from hybrid_grpo.data.packing import pack  # noqa: E402
from hybrid_grpo.generation import Request, Sampling, generate, stream_key  # noqa: E402
from hybrid_grpo.model.attention import ATTENTION  # noqa: E402
from hybrid_grpo.model.gguf import files_of  # noqa: E402
from hybrid_grpo.model.logprobs import LogprobModel  # noqa: E402
from hybrid_grpo.model.sidecars import TokenRow  # noqa: E402

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
            row_of = TokenRow.of([prompt], [completion.token_ids])
            for micro in pack(row_of, 2 * tokens + 99, torch.device("cpu"), share="on"):
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


CHATS = [f"{ask} {what}." for ask in ("Explain", "Write a poem about", "List five facts about", "Ask me about")
         for what in ("rain", "the number seven", "Paris in winter", "how bread is made", "recursion")]  # fmt: skip


@torch.no_grad()
def beside_transformers(name: str, dtype: torch.dtype, tokens: int) -> dict[str, float]:
    """Compare greedy completions of chats, and their log-probabilities, with those of transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = files_of(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain, ours = (AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()
                   for attention in ("sdpa", ATTENTION))  # fmt: skip
    equal, gaps = 0, []
    for chat in CHATS:
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": chat}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        prompt = asked["input_ids"][0].tolist()
        request = Request(prompt, [stream_key(0, 0)])
        stop = (tokenizer.eos_token_id,)
        [[found]], _ = generate(ours, [request], Sampling(tokens, temperature=0.0, stop_ids=stop))
        theirs = plain.generate(**asked, max_new_tokens=tokens, do_sample=False)[0, len(prompt) :].tolist()
        equal += theirs == found.token_ids
        logits = plain(torch.tensor([prompt + found.token_ids])).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(found.token_ids)[:, None]).squeeze(-1)
        gaps.append((expected - torch.tensor(found.logp)).abs().max().item())
    return {"chats": len(CHATS), "equal": equal, "largest gap in nats": float(f"{max(gaps):.2g}")}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default=",".join(FAMILIES))
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--model", help="a real model, folder or GGUF file")
    given = parser.parse_args()
    found: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "machine": machine()}
    if given.model:
        for dtype in (torch.float32, torch.bfloat16):
            found[str(dtype)] = beside_transformers(given.model, dtype, given.tokens)
            print(dtype, found[str(dtype)], flush=True)
    else:
        found["length"] = by_length(given.only.split(","), given.tokens)
    save(given.json, found)


if __name__ == "__main__":
    main()
