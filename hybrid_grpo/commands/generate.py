"""`generate`: prompts in, completions out, one JSON object a line. No engine: every rank holds the whole model.

The completions are those that step 0 of a training run with the same settings would sample. Each is written as soon as
it is finished, so lines are in the order of finishing; `id` (the number of the prompt) and `sample` identify them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hybrid_grpo.config import GenerateConfig
from hybrid_grpo.config.checks import check_generate
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.parsing import parse
from hybrid_grpo.run.files import json_safe

if TYPE_CHECKING:
    import torch

    from hybrid_grpo.data.batch import Completion, Prompt
    from hybrid_grpo.generation import OnFinish


def run(arguments: list[str]) -> None:
    """Parse, load and complete; ends quietly when the reader of the output has closed it."""
    config = parse(GenerateConfig, arguments, "generate").config
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    check_generate(config, ranks)
    try:
        _generate(config, rank, ranks)
    except BrokenPipeError:
        # Buffered output would fail once more when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _generate(config: GenerateConfig, rank: int, ranks: int) -> None:
    # The settings are sound: now the imports that take seconds.
    from hybrid_grpo.data.lines import read_lines, typed
    from hybrid_grpo.data.loader import rank_share
    from hybrid_grpo.data.prompts import read_prompts
    from hybrid_grpo.generation.rollout import attention_of, complete, requests_of, sampling_of
    from hybrid_grpo.model.architectures import check_architecture
    from hybrid_grpo.model.loading import (
        check_lengths,
        check_token_ids,
        load_config,
        load_model,
        load_tokenizer,
        stop_ids,
    )
    from hybrid_grpo.run.inputs import sampling_line

    rollout, count = config.rollout, config.rollout.num_generations
    model_config = load_config(config.policy.model)
    check_architecture(model_config, rollout.decoder)
    check_token_ids(rollout, model_config)
    tokenizer = load_tokenizer(config.policy.model)
    ends = stop_ids(config.policy.model, tokenizer, rollout.stop_ids)

    def read_typed(line: bytes, number: int) -> Prompt:
        [prompt], _ = read_lines([line], config.data, tokenizer, first=number)
        check_lengths(model_config, len(prompt.token_ids) + rollout.max_completion_tokens)
        return prompt

    batches: Iterable[list[Prompt]]
    if config.reads_stdin and sys.stdin.isatty():
        data = "one prompt a line, until the end of the input (Ctrl-D)"
        batches = ([prompt] for prompt in typed(sys.stdin.buffer, read_typed))
    else:
        lines = read_lines(sys.stdin.buffer, config.data, tokenizer) if config.reads_stdin else None
        prompts, report = lines or read_prompts(config.data, tokenizer)
        check_lengths(model_config, max(len(p.token_ids) for p in prompts) + rollout.max_completion_tokens)
        data = str(report)
        batches = [rank_share(prompts, rank, ranks)]
    if rank == 0:
        sampling = f"{count} of each prompt, run.seed {config.run.seed}, {sampling_line(rollout, ends, tokenizer)}"
        print(f"data: {data}\nsampling: {sampling}", file=sys.stderr, flush=True)

    with _output(config.generate.output, rank, ranks) as file:
        model = load_model(config.policy, attention_of(rollout.decoder)).to(_device()).eval()
        for batch in batches:
            requests = requests_of(batch, count, config.run.seed, step=0)
            with _progress(len(batch) * count, shown=rank == 0 and not file.isatty()) as advance:
                on_finish = _writer(file, batch, advance)
                complete(model, tokenizer, requests, sampling_of(rollout, ends), rollout, on_finish)


def _device() -> torch.device:
    """The device of this rank; there is no process group to ask."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


@contextmanager
def _output(name: str, rank: int, ranks: int) -> Iterator[BinaryIO]:
    """The file of this rank, overwritten, or standard output."""
    if name == "-":
        yield sys.stdout.buffer
        return
    path = Path(name)
    path = path if ranks == 1 else path.with_name(f"{path.stem}.{rank}{path.suffix}")
    try:
        file = path.open("wb")
    except OSError as error:
        raise UserError(f"generate.output {path} cannot be written: {error.strerror}") from error
    with file:
        yield file


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[], None]]:
    """A progress bar over the completions, shown only where standard error is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("completions"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    disable = not (shown and console.is_terminal)
    # Otherwise the lines on standard output would be printed through the console of the bar.
    with Progress(*columns, console=console, disable=disable, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("completions", total=total)
        yield lambda: bar.advance(task)


def _writer(file: BinaryIO, prompts: list[Prompt], advance: Callable[[], None]) -> OnFinish:
    def write(request: int, sample: int, completion: Completion) -> None:
        file.write(_line(prompts[request], sample, completion))
        file.flush()
        advance()

    return write


def _line(prompt: Prompt, sample: int, completion: Completion) -> bytes:
    values = {
        "id": prompt.id,
        "sample": sample,
        "prompt": prompt.text,
        "completion": completion.text,
        "finish": completion.finish,
        "tokens": len(completion.token_ids),
        "logp": sum(completion.logp),
        **({"columns": prompt.columns} if prompt.columns else {}),
    }
    return json.dumps(json_safe(values), ensure_ascii=False).encode("utf-8", errors="replace") + b"\n"
