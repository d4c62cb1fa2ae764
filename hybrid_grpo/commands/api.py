"""The commands from Python: `import hybrid_grpo as hg; hg.train(model=..., data=..., rewards=[f], ...)`.

Every keyword is a section of the configuration, as a dictionary. `model`, `data` and `rewards` are shorthand for
settings that nearly every call has; they also accept objects, whereas the command line accepts only names. A single
process needs no launcher; under the `deepspeed` launcher, the same script runs on every rank, and every rank returns. A
mistake raises UserError: one line that names the setting and the way out.
"""

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from hybrid_grpo.commands.arguments import in_words_of_python, save_model, settings_from
from hybrid_grpo.commands.configs import EvaluateConfig, GenerateConfig, PublishConfig
from hybrid_grpo.commands.finished_run import FinishedRun
from hybrid_grpo.config import SftConfig, TrainConfig
from hybrid_grpo.config.building import refuse_unused
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.config.parsing import ConfigT, Parsed, configure
from hybrid_grpo.run.launchers import adopt_rank

__all__ = ["FinishedRun", "UserError", "evaluate", "generate", "publish", "sft", "train"]


def train(
    model: Any = None, data: Any = None, rewards: Any = None, *, config: Any = None, **sections: Any
) -> FinishedRun:
    """Train by GRPO, as `hybrid-grpo train` does.

    Args:
        model: folder or hub name of the starting model, `policy.model`, or a model of transformers.
        data: the prompts (a value of `data.path`, a `datasets.Dataset` or `DatasetDict`, a DataFrame, a list of
            dictionaries, a dictionary of columns) or the section `data`.
        rewards: names, functions, or dictionaries with a `function` and its settings.
        config: a recipe (a YAML file, or a dictionary of sections), or several. Later recipes override earlier ones;
            other arguments override both.
        sections: sections of the configuration, as in `policy={"lr": 1e-6}`; `hybrid-grpo train --help` lists them.
            `lora` may be a `peft.LoraConfig`.

    A run without a name is named by its command and the time. In a notebook, the square button saves a checkpoint and
    ends the run.
    """
    from hybrid_grpo.commands.train import train as run

    with _call():
        return FinishedRun(run(_configure(TrainConfig, "train", model, data, rewards, config, sections)))


def sft(model: Any = None, data: Any = None, *, config: Any = None, **sections: Any) -> FinishedRun:
    """Train on pairs of prompt and completion, as `hybrid-grpo sft` does; for the arguments see `train`."""
    from hybrid_grpo.commands.sft import sft as run

    with _call():
        return FinishedRun(run(_configure(SftConfig, "sft", model, data, None, config, sections)))


def evaluate(
    model: Any = None, data: Any = None, rewards: Any = None, *, config: Any = None, **sections: Any
) -> dict[str, float]:
    """Measure accuracy, reward and more on held-out sets, as `hybrid-grpo eval` does.

    The arguments are those of `train`, except that `data` has the held-out prompts; a section `data` is used as it is.
    Returns the numbers by metric name, such as `eval/heldout/accuracy`; they are the same on every rank.
    """
    from hybrid_grpo.commands.eval import evaluate as run

    with _call():
        settings = _configure(EvaluateConfig, "evaluate", model, data, rewards, config, sections).config
        for name in ("against", "output"):
            refuse(getattr(settings.eval, name) is not None, f"eval.{name} is for the command line: remove it")
        return run(settings)


def generate(model: Any = None, data: Any = None, *, config: Any = None, **sections: Any) -> list[dict[str, Any]]:
    """Sample completions of prompts, as `hybrid-grpo generate` does; for the arguments see `train`. `data` may also be
    a list of texts.

    Returns one dictionary per completion of this rank's share of the prompts, in the order of the prompts. Its keys are
    `id`, `sample`, `prompt`, `completion`, `finish`, `tokens`, `logp` and, if the data has any, `columns`; with
    `generate={"token_logp": True}` also `token_ids` and `token_logp`.
    """
    from hybrid_grpo.commands.generate import generate as run

    with _call():
        if isinstance(data, list | tuple):
            data = [{"prompt": row} if isinstance(row, str) else row for row in data]
        parsed = _configure(GenerateConfig, "generate", model, data, None, config, sections)
        if parsed.config.reads_stdin:
            raise UserError("data.path is not set: give data, such as a list of prompts")
        rows: list[dict[str, Any]] = []
        run(parsed.config, nullcontext(rows.append))
        return sorted(rows, key=lambda row: (row["id"], row["sample"]))


def publish(run: FinishedRun | Path | str, **settings: Any) -> str:
    """Publish the trained model of a run with a model card, as `hybrid-grpo publish` does.

    `run` is what `train` or `sft` returned, or the folder of a run; the keywords are the settings of
    `publish`, as in `folder="published"`. Returns the address of the repository, or the folder.
    """
    from hybrid_grpo.commands.publish import publish as publish_run

    with _call():
        folder = run.folder if isinstance(run, FinishedRun) else Path(run)
        return publish_run(folder, configure(PublishConfig, {"publish": settings}).config.publish)


def _configure(
    cls: type[ConfigT], command: str, model: Any, data: Any, rewards: Any, config: Any, sections: Mapping[str, Any]
) -> Parsed[ConfigT]:
    adopt_rank()
    refuse_unused(cls, sections)
    settings = settings_from(cls, command, model, data, rewards, config, sections)
    parsed = configure(cls, settings)
    # Not before the settings are known to be right.
    save_model(model, settings.get("policy", {}).get("model", ""))
    return parsed


@contextmanager
def _call() -> Iterator[None]:
    """A context of one call: mistakes are named in words of Python, and signals are handled as before afterwards."""
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {stop: signal.getsignal(stop) for stop in stops} if is_main else {}
    try:
        with in_words_of_python():
            yield
    finally:
        for stop, handler in handlers.items():
            signal.signal(stop, handler if handler is not None else signal.SIG_DFL)
