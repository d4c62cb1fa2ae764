"""`generate`: prompts in, completions out, one JSON object a line. No engine: every rank holds the whole model.

The completions are those that step 0 of a training run with the same settings would sample. Each is written as soon as
it is finished, so lines are in the order of finishing; `id` (the number of the prompt) and `sample` identify them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hybrid_grpo.config import GenerateConfig
from hybrid_grpo.config.checks import check_generate
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.parsing import parse
from hybrid_grpo.run.files import json_lines, reader_may_leave

if TYPE_CHECKING:
    import torch

    from hybrid_grpo.data.batch import Completion, Prompt
    from hybrid_grpo.data.sources import Source


def run(arguments: list[str]) -> None:
    """Parse, load and complete; ends quietly when the reader of the output has closed it."""
    config = parse(GenerateConfig, arguments, "generate").config
    path = Path(config.generate.output)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        path = path.with_name(f"{path.stem}.{os.environ.get('RANK', '0')}{path.suffix}")
    with reader_may_leave():
        generate(config, json_lines(str(path), "generate.output"))


def generate(config: GenerateConfig, output: AbstractContextManager[Callable[[dict[str, Any]], None]]) -> None:
    """Complete this rank's share of the prompts.

    Args:
        output: opened when the prompts have been read; it is called with every completion as soon as it is finished.

    Raises:
        UserError: one line that names the setting and the way out.
    """
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    check_generate(config, ranks)

    # The settings are sound: now the imports that take seconds.
    from hybrid_grpo.data.loader import rank_share
    from hybrid_grpo.data.prompts import read_prompts
    from hybrid_grpo.data.sources import standard_input, training_source
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

    def piped(lines: Iterable[bytes]) -> Source:
        return standard_input(lines, "data.path", config.data.limit, config.data.prompt_column)

    def read(source: Source) -> tuple[list[Prompt], str]:
        prompts, data = read_prompts(config.data, tokenizer, source)
        check_lengths(model_config, max(len(p.token_ids) for p in prompts) + rollout.max_completion_tokens)
        return prompts, data

    batches: Iterable[list[Prompt]]
    if config.reads_stdin and sys.stdin.isatty():
        data = "one prompt a line, until the end of the input (Ctrl-D)"
        batches = _typed(sys.stdin.buffer, lambda line: read(piped([line]))[0])
    else:
        prompts, data = read(piped(sys.stdin.buffer) if config.reads_stdin else training_source(config.data))
        batches = [rank_share(prompts, rank, ranks)]
    if rank == 0:
        sampling = f"{count} of each prompt, run.seed {config.run.seed}, {sampling_line(rollout, ends, tokenizer)}"
        print(f"data: {data}\nsampling: {sampling}", file=sys.stderr, flush=True)

    # Completions on the terminal say themselves how far it is.
    console = Console(stderr=True)
    shown = rank == 0 and console.is_terminal and not (config.generate.output == "-" and sys.stdout.isatty())
    with output as write:
        model = load_model(config.policy, attention_of(rollout.decoder)).to(_device()).eval()

        def complete_all(prompts: list[Prompt]) -> None:
            with _progress(console, len(prompts) * count, shown) as advance:

                def on_finish(request: int, sample: int, completion: Completion) -> None:
                    write(_values(prompts[request], sample, completion))
                    advance()

                requests = requests_of(prompts, count, config.run.seed, step=0)
                complete(model, tokenizer, requests, sampling_of(rollout, ends), rollout, on_finish)

        for prompts in batches:
            complete_all(prompts)


@contextmanager
def _progress(console: Console, total: int, shown: bool) -> Iterator[Callable[[], None]]:
    """A progress bar over the completions."""
    columns = (TextColumn("completions"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    # With redirection, the lines on standard output would be printed through the console of the bar.
    with Progress(*columns, console=console, disable=not shown, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


def _typed(stdin: BinaryIO, read: Callable[[bytes], list[Prompt]]) -> Iterator[list[Prompt]]:
    """Ask for one prompt after another until the input ends. A mistake is printed, and the next prompt is asked for."""
    number = 0
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = stdin.readline()
        if not line:
            print(file=sys.stderr)
            return
        if not line.strip():
            continue
        try:
            [prompt] = read(line)
        except UserError as error:
            print(error, file=sys.stderr)
            continue
        yield [replace(prompt, id=number)]
        number += 1


def _device() -> torch.device:
    """The device of this rank; there is no process group to ask."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _values(prompt: Prompt, sample: int, completion: Completion) -> dict[str, Any]:
    return {
        "id": prompt.id,
        "sample": sample,
        "prompt": prompt.text,
        "completion": completion.text,
        "finish": completion.finish,
        "tokens": len(completion.token_ids),
        "logp": sum(completion.logp),
        **({"columns": prompt.columns} if prompt.columns else {}),
    }
