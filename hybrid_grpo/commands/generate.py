"""`generate`: reads prompts and writes completions, one JSON object per line. Every rank holds the whole model.

The completions are those that step 0 of a training run with the same settings would sample. Each is written as soon as
it finishes, so lines are in the order of finishing; `id` (the number of the prompt) and `sample` identify them.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from hybrid_grpo.commands.arguments import is_run, options_of_run
from hybrid_grpo.commands.configs import GenerateConfig
from hybrid_grpo.config.checks import check_output, check_policy
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.parsing import leading_argument, parse
from hybrid_grpo.config.sources import check_source
from hybrid_grpo.records.console import make_console
from hybrid_grpo.records.files import json_lines

if TYPE_CHECKING:
    import torch

    from hybrid_grpo.data.batch import Completion, Prompt
    from hybrid_grpo.data.sources import Source

COMMAND = "generate [MODEL [PROMPT]]"


def run(arguments: list[str]) -> None:
    """Parse the arguments, load the model and complete prompts; end quietly if the reader of the output closes it."""
    options, prompt = _options(arguments)
    config = parse(GenerateConfig, options, COMMAND).config
    refuse(prompt is not None and not config.reads_stdin, "a prompt and a data set are given: remove one of them")
    path = Path(config.generate.output)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        path = path.with_name(f"{path.stem}.{os.environ.get('RANK', '0')}{path.suffix}")
    generate(config, json_lines(str(path), "generate.output"), prompt)


def _options(arguments: list[str]) -> tuple[list[str], str | None]:
    """Return the options, and the prompt if one follows the model. A run in its place gives settings, not prompts."""
    prompt = None
    if len(arguments) > 1 and not any(argument.startswith("-") for argument in arguments[:2]):
        prompt, arguments = arguments[1], arguments[:1] + arguments[2:]
    name, options = leading_argument(arguments, f"{COMMAND} [options]", optional=True)
    if not is_run(name):
        return ["--policy.model", name, *options] if name else options, prompt
    has_data = any(option.partition("=")[0] in ("--data.path", "--data.task") for option in options)
    prompts = [] if has_data else ["--data.path", "", "--data.task", "null"]
    return [*options_of_run(name), *prompts, *options], prompt


def generate(
    config: GenerateConfig, output: AbstractContextManager[Callable[[dict[str, Any]], None]], prompt: str | None = None
) -> None:
    """Complete this rank's share of the prompts, or `prompt` in place of standard input. `output` is entered once the
    prompts have been read, and yields a function to be called with each finished completion. Raises UserError."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    _check(config, ranks)

    from hybrid_grpo.data.loader import rank_share
    from hybrid_grpo.data.pictures import sight_of
    from hybrid_grpo.data.prompts import read_prompts
    from hybrid_grpo.generation import Callbacks
    from hybrid_grpo.generation.rollout import attention_of, complete, requests_of, sampling_of
    from hybrid_grpo.model.loading import load_model
    from hybrid_grpo.model.reading import Reading
    from hybrid_grpo.run.sampling import SamplingContext
    from hybrid_grpo.turns.partners import partners_of, with_tools

    rollout, count = config.rollout, config.rollout.num_generations
    sampler = SamplingContext.read(config.policy, rollout)
    tokenizer, ends = sampler.tokenizer, sampler.stop_ids
    partners = partners_of(config, tokenizer, ends, sampler.album)
    prompts, data = read_prompts(with_tools(config.data, partners), tokenizer, _source(config, prompt), sampler.album)
    sampler.check_prompts(prompts, partners)
    prompts = rank_share(prompts, rank, ranks)
    if partners is not None:
        prompts = partners.opened(prompts, step=0)
    if rank == 0:
        sampling = f"{count} of each prompt, run.seed {config.run.seed}, {sampler.fact}"
        warning = sampler.warning(prompts, config.data)
        print(f"data: {data}\nsampling: {sampling}\n{warning}".strip(), file=sys.stderr, flush=True)

    # Completions that are printed on the terminal show the progress themselves.
    console = make_console(stderr=True)
    shown = rank == 0 and console.is_terminal and not (config.generate.output == "-" and sys.stdout.isatty())
    # With redirection, the lines on standard output would be printed through the console of the bar.
    bar = Progress(console=console, disable=not shown, redirect_stdout=False, redirect_stderr=False)
    with output as write:
        device = _device()
        model = load_model(config.policy, attention_of(rollout.decoder)).to(device).eval()
        reading = Reading(sight_of(sampler.album, config.policy, device))
        requests = requests_of(prompts, rollout, config.run.seed, step=0)
        with bar:
            task = bar.add_task("completions", total=len(prompts) * count)

            def on_finish(request: int, sample: int, completion: Completion) -> None:
                of_tokens = {"token_ids": completion.token_ids, "token_logp": completion.logp}
                values = _values(prompts[request], sample, completion)
                write(values | of_tokens if config.generate.token_logp else values)
                bar.advance(task)

            drawn = sampling_of(rollout, ends)
            complete(model, tokenizer, requests, drawn, rollout, Callbacks(on_finish, turns=partners, reading=reading))


def _check(config: GenerateConfig, world_size: int) -> None:
    check_policy(config.policy)
    output = config.generate.output
    if config.reads_stdin:
        refuse(world_size > 1, f"data.path is standard input, which {world_size} ranks cannot share: give a source")
    elif config.data.path != "":
        check_source("data.path", config.data.path)
    refuse(output == "-" and world_size > 1, f"generate.output - cannot be shared by {world_size} ranks: name a file")
    check_output("generate.output", output, "the prompts of data.path", config.data.path)


def _source(config: GenerateConfig, prompt: str | None) -> Source:
    """Return the prompts' source, which is standard input if the settings name none, or a single prompt."""
    from hybrid_grpo.data.sources import standard_input, training_source

    if not config.reads_stdin:
        return training_source(config.data)
    if prompt is None and sys.stdin.isatty():
        print("one prompt per line, until the end of the input (Ctrl-D)", file=sys.stderr, flush=True)
    line = None if prompt is None else io.BytesIO(json.dumps({config.data.prompt_column: prompt}).encode())
    return standard_input(line or sys.stdin.buffer, "data.path", config.data.limit, config.data.prompt_column)


def _device() -> torch.device:
    """Return the device of this rank, found without a process group."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _values(prompt: Prompt, sample: int, completion: Completion) -> dict[str, Any]:
    return {
        "id": prompt.id, "sample": sample, "prompt": prompt.text, "completion": completion.text,
        **({"messages": completion.messages} if completion.messages else {}), "finish": completion.finish,
        "tokens": len(completion.token_ids), "logp": sum(completion.logp),
        **({"columns": prompt.columns} if prompt.columns else {}),
    }  # fmt: skip
