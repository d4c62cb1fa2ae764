"""The engines that rollout.py compares: same weights, same prompts, same forced lengths.

An engine is built once in its own process. Called with a workload it returns a context manager. Entering it does what
precedes decoding (a request queue, padded prompts), which is not timed. It yields a function that does the rest and
returns the number of tokens of every completion, group after group.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from plan_gpus import MODELS, Shape, model_config
from rollout_workloads import Workload
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hybrid_grpo.distributed.hardware import of_device
from hybrid_grpo.generation import Request, Sampling, Stats, Workspace, generate
from hybrid_grpo.model.attention import ATTENTION

TINY: Shape = {
    **{"model_type": "qwen2", "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True},
}
TINY_STATES: Shape = {
    **{**TINY, "model_type": "qwen3_5_text", "head_dim": 64},
    **{"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
}
"""The sizes of TINY, with three layers of Gated DeltaNet to one of attention."""
_SHAPES = {"tiny": TINY, "tiny-qwen3.5": TINY_STATES}
_SHAPES |= {size: MODELS[f"Qwen2.5-{size.upper()}"] for size in ("0.5b", "1.5b", "7b")}
_SHAPES["qwen3-0.6b"] = MODELS["Qwen3-0.6B"]

Engine = Callable[[Workload], AbstractContextManager[Callable[[], list[int]]]]


def build_model(shape: str, attention: str, device: str) -> Any:
    """A random model, the same one for every engine: the tiny ones in float32, the others in bfloat16."""
    torch.manual_seed(0)
    config = model_config(_SHAPES[shape])
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    dtype = torch.float32 if shape.startswith("tiny") else torch.bfloat16
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).eval()


class Hybrid:
    """This package's decoder. `model` and the `stats` of the last run are kept for the bandwidth floor.

    On a GPU memory is laid out and graphs are captured before the first run, which training does once.
    """

    def __init__(self, shape: str, device: str) -> None:
        self.model = build_model(shape, ATTENTION, device)
        self.stats = Stats()
        self.workspace: Workspace | None = None

    def lay_out(self, workload: Workload) -> None:
        """Make the workspace large enough for a workload."""
        tokens = max(map(len, workload.prompts)) + workload.limit
        if self.workspace is None or tokens > self.workspace.tokens or workload.slots > self.workspace.slots:
            self.workspace = Workspace(workload.slots, tokens)
            generate(self.model, [Request([0], keys=[0])], Sampling(max_tokens=1), workspace=self.workspace)

    @contextmanager
    def __call__(self, workload: Workload) -> Iterator[Callable[[], list[int]]]:
        keys = iter(range(len(workload.rows)))
        requests = [
            Request(ids, keys=[next(keys) for _ in lengths], limits=lengths)
            for ids, lengths in zip(workload.prompts, workload.lengths, strict=True)
        ]

        if self.model.device.type == "cuda":
            self.lay_out(workload)

        def decode() -> list[int]:
            groups, self.stats = generate(
                self.model,
                requests,
                Sampling(max_tokens=workload.limit),
                max_slots=workload.slots,
                workspace=self.workspace,
            )
            return [len(completion.token_ids) for group in groups for completion in group]

        yield decode


def padded(rows: list[tuple[list[int], int]], device: str) -> tuple[Tensor, Tensor]:
    """Prompts padded to the left, and their mask; int64 [n, S]."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([[0] * (width - len(ids)) + ids for ids, _ in rows], device=device)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in rows], device=device)
    return ids, mask


class _Lengths(StoppingCriteria):
    """A row is done at its length; `generate` stops when all rows are done."""

    def __init__(self, prompt_width: int, lengths: list[int], device: str) -> None:
        self.end_n = prompt_width + torch.tensor(lengths, device=device)

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return input_ids.shape[1] >= self.end_n


def transformers_generate(shape: str, device: str) -> Engine:
    """`model.generate` over left-padded prompts, as TRL calls it; stops when the longest row is done."""
    model = build_model(shape, "sdpa", device)

    @contextmanager
    def engine(workload: Workload) -> Iterator[Callable[[], list[int]]]:
        config = GenerationConfig(
            do_sample=True, top_k=0, temperature=1.0, eos_token_id=None, pad_token_id=0, max_new_tokens=workload.limit
        )

        def chunk(rows: list[tuple[list[int], int]]) -> list[int]:
            ids, mask = padded(rows, device)
            lengths = [n for _, n in rows]
            stop = StoppingCriteriaList([_Lengths(ids.shape[1], lengths, device)])
            out = model.generate(ids, attention_mask=mask, generation_config=config, stopping_criteria=stop)
            assert out.shape[1] - ids.shape[1] == max(lengths)
            return lengths

        chunks = [workload.rows[k : k + workload.slots] for k in range(0, len(workload.rows), workload.slots)]
        yield lambda: [n for rows in chunks for n in chunk(rows)]

    return engine


def generate_batch(shape: str, device: str) -> Engine:
    """transformers' continuous batching with the fastest settings found, through the manager that accepts a length per
    request."""
    # Otherwise it repeats keys and values for every query head before masked attention: 25 % of its time here.
    os.environ["TRANSFORMERS_SDPA_FORCE_GQA"] = "1"
    model = build_model(shape, "sdpa", device)

    @contextmanager
    def engine(workload: Workload) -> Iterator[Callable[[], list[int]]]:
        rows = workload.rows
        config = GenerationConfig(
            do_sample=True, top_k=0, temperature=1.0, eos_token_id=-1, pad_token_id=0, max_new_tokens=workload.limit
        )
        batching = _batching(rows, workload.slots, device)
        with model.continuous_batching_context_manager(config, continuous_batching_config=batching) as manager:
            yield lambda: _through(manager, rows)

    return engine


def _batching(rows: list[tuple[list[int], int]], slots: int, device: str) -> ContinuousBatchingConfig:
    """The fastest settings found, on the CPU for each workload's mean context."""
    longest = max(len(ids) + n for ids, n in rows)
    if device == "cuda":
        # With flash attention, which it takes where it is installed, cost follows the real lengths: all slots at
        # once. The pages for all of them and its margin of 15 %, not all free memory: other engines stand beside it.
        blocks = slots * -(-longest // 256) * 5 // 4
        return ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=2048, max_requests_per_batch=slots)
    # On the CPU a batch is one dense product of all its queries with all its keys, most of it masked, so cost grows
    # with the square of the batch: 24 requests at a time are fastest at a mean context of 110 tokens (128: 1.5 times
    # slower), 8 at 1,050 (16: 1.7 times slower). Pages of 256 tokens are slower, as they share no short prompt;
    # batches of 128 or 512 tokens are a little slower, torch.compile ten times, `paged|eager` attention about 1.5.
    context = sum((len(ids) + n / 2) * n for ids, n in rows) / sum(n for _, n in rows)
    batch = min(slots, len(rows), max(4, round(256 / context**0.5)))
    # Twice the need, so that neither the safety margin nor shared prompts limit anything.
    blocks = 2 * batch * (-(-longest // 16) + 1)
    return ContinuousBatchingConfig(page_size=16, num_blocks=blocks, max_batch_tokens=256, max_requests_per_batch=batch)


def _through(manager: Any, rows: list[tuple[list[int], int]]) -> list[int]:
    """Put all requests in the queue and wait for all results."""
    names = [manager.add_request(ids, max_new_tokens=n) for ids, n in rows]
    produced: dict[str, int] = {}
    while len(produced) < len(names):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            produced[result.request_id] = len(result.generated_tokens)
        elif result is None and not manager.is_running():
            raise RuntimeError("continuous batching stopped before all requests were finished")
    return [produced[name] for name in names]


def bandwidth_floor(hybrid: Hybrid) -> float:
    """Seconds that the device would need to read the data of the last run's decode steps."""
    model = hybrid.model
    config = model.config
    size = next(model.parameters()).element_size()
    weights = sum(p.numel() for p in model.parameters()) * size
    if not config.tie_word_embeddings:
        # Only the tokens' rows of the input embedding are read.
        weights -= model.get_input_embeddings().weight.numel() * size
    head_dim = config.hidden_size // config.num_attention_heads
    entry = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * size
    moved = hybrid.stats.steps * weights + hybrid.stats.context * entry
    return moved / _bandwidth(model.device)


@cache
def _bandwidth(device: torch.device) -> float:
    return of_device(device, "bfloat16" if device.type == "cuda" else "float32").bandwidth


BUILDERS: dict[str, Callable[[str, str], Engine]] = {
    "hybrid": Hybrid,
    "generate": transformers_generate,
    "generate_batch": generate_batch,
}
