"""The commands from Python: `import hybrid_grpo as hg; hg.train(model=..., data=..., rewards=[f], ...)`.

Every keyword is a section of the configuration, as a dictionary. `model`, `data` and `rewards` are shorthand for
settings that nearly every call has; they also accept objects, whereas the command line accepts only names. A single
process needs no launcher; under the `deepspeed` launcher, the same script runs on every rank, and every rank returns. A
mistake raises UserError: one line that names the setting and the way out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_grpo.config import EvaluateConfig, GenerateConfig, PublishConfig, RewardStageConfig, SftConfig, TrainConfig
from hybrid_grpo.config.building import refuse_unused
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.config.parsing import ConfigT, Parsed, configure
from hybrid_grpo.config.recipes import overlay, read_recipe
from hybrid_grpo.records.json_lines import read_jsonl
from hybrid_grpo.run.launchers import adopt_rank

if TYPE_CHECKING:
    import pandas

__all__ = ["FinishedRun", "UserError", "evaluate", "generate", "publish", "reward", "sft", "train"]


@dataclass(frozen=True)
class FinishedRun:
    """The results of a run."""

    folder: Path
    """The run folder."""

    @property
    def model(self) -> Path:
        """Folder of the trained model, which loads with `from_pretrained`."""
        return self.folder / "model"

    @property
    def metrics(self) -> pandas.DataFrame:
        """The metrics of metrics.jsonl as a table: one row per step, one column per metric."""
        import pandas

        return pandas.DataFrame(read_jsonl(self.folder / "metrics.jsonl"))


def train(
    model: Any = None, data: Any = None, rewards: Any = None, *, config: Any = None, **sections: Any
) -> FinishedRun:
    """Train by GRPO, as `hybrid-grpo train` does.

    Args:
        model: folder or hub name of the starting model, `policy.model`.
        data: the prompts (a value of `data.path`, a `datasets.Dataset`, a list of dictionaries) or the section `data`.
        rewards: names, functions, or dictionaries with a `function` and its settings.
        config: a YAML recipe or a list of recipes. Later recipes override earlier ones; other arguments override both.
        sections: sections of the configuration, as in `policy={"lr": 1e-6}`; `hybrid-grpo train --help` lists them.
    """
    from hybrid_grpo.commands.train import train as run

    return FinishedRun(run(_configure(TrainConfig, model, data, rewards, config, sections)))


def sft(model: Any = None, data: Any = None, *, config: Any = None, **sections: Any) -> FinishedRun:
    """Train on pairs of prompt and completion, as `hybrid-grpo sft` does; for the arguments see `train`."""
    from hybrid_grpo.commands.sft import sft as run

    return FinishedRun(run(_configure(SftConfig, model, data, None, config, sections)))


def reward(model: Any = None, data: Any = None, *, config: Any = None, **sections: Any) -> FinishedRun:
    """Train a reward model on pairs of answers, as `hybrid-grpo reward` does; for the arguments see `train`."""
    from hybrid_grpo.commands.reward import reward as run

    return FinishedRun(run(_configure(RewardStageConfig, model, data, None, config, sections)))


def evaluate(
    model: Any = None, data: Any = None, rewards: Any = None, *, config: Any = None, **sections: Any
) -> dict[str, float]:
    """Measure accuracy, reward and more on held-out sets, as `hybrid-grpo eval` does.

    The arguments are those of `train`, except that `data` has the held-out prompts; a section `data` is used as it is.
    Returns the numbers by metric name, such as `eval/heldout/accuracy`; they are the same on every rank.
    """
    from hybrid_grpo.commands.eval import evaluate as run

    if data is not None and not isinstance(data, Mapping):
        data = {"eval_path": data}
    settings = _configure(EvaluateConfig, model, data, rewards, config, sections).config
    for name in ("against", "output"):
        refuse(getattr(settings.eval, name) is not None, f"eval.{name} is for the command line: take it out")
    return run(settings)


def generate(model: Any = None, data: Any = None, *, config: Any = None, **sections: Any) -> list[dict[str, Any]]:
    """Sample completions of prompts, as `hybrid-grpo generate` does; for the arguments see `train`. `data` may also be
    a list of texts.

    Returns one dictionary per completion of this rank's share of the prompts, in the order of the prompts. Its keys are
    `id`, `sample`, `prompt`, `completion`, `finish`, `tokens`, `logp` and, if the data has any, `columns`; with
    `generate={"token_logp": True}` also `token_ids` and `token_logp`.
    """
    from hybrid_grpo.commands.generate import generate as run

    if isinstance(data, Sequence) and not isinstance(data, str):
        data = [{"prompt": row} if isinstance(row, str) else row for row in data]
    parsed = _configure(GenerateConfig, model, data, None, config, sections)
    if parsed.config.reads_stdin:
        raise UserError("data.path is not set: give data, such as a list of prompts")
    rows: list[dict[str, Any]] = []
    run(parsed.config, nullcontext(rows.append))
    return sorted(rows, key=lambda row: (row["id"], row["sample"]))


def publish(run: FinishedRun | Path | str, **settings: Any) -> str:
    """Publish the trained model of a run with a model card, as `hybrid-grpo publish` does.

    `run` is what `train`, `sft` or `reward` returned, or the folder of a run; the keywords are the settings of
    `publish`, as in `folder="published"`. Returns the address of the repository, or the folder.
    """
    from hybrid_grpo.commands.publish import publish as publish_run

    folder = run.folder if isinstance(run, FinishedRun) else Path(run)
    return publish_run(folder, configure(PublishConfig, {"publish": settings}).config.publish)


def _configure(
    cls: type[ConfigT], model: Any, data: Any, rewards: Any, config: Any, sections: Mapping[str, Any]
) -> Parsed[ConfigT]:
    adopt_rank()
    settings: dict[str, Any] = {}
    recipes = [config] if isinstance(config, str | Path) else config or []
    for recipe in recipes:
        settings = overlay(settings, read_recipe(Path(recipe)))
    refuse_unused(cls, sections)
    settings = overlay(settings, sections)
    if model is not None:
        settings = overlay(settings, {"policy": {"model": str(model)}})
    if data is not None:
        path = str(data) if isinstance(data, Path) else data
        settings = overlay(settings, {"data": data if isinstance(data, Mapping) else {"path": path}})
    if rewards is not None:
        settings["rewards"] = list(rewards) if isinstance(rewards, list | tuple) else [rewards]
    return configure(cls, settings)
