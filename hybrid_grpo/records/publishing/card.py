"""Writes the model card of a published model from the folder of its run.

`card.md.j2` is the template of the card's text, and huggingface_hub writes its metadata for the hub. The card contains
neither secrets nor local folders: see `redaction.py`.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hybrid_grpo.config import SftConfig, TrainConfig, to_dict
from hybrid_grpo.config.composition import about
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.recipes import Dumper, read_recipe
from hybrid_grpo.config.sources import looks_like_path
from hybrid_grpo.config.tasks import READY_MADE, ready_made_settings
from hybrid_grpo.records.exports import exported
from hybrid_grpo.records.json_lines import read_jsonl
from hybrid_grpo.records.publishing.redaction import publishable, publishable_text

_STAGES: dict[str, tuple[str, str, Any]] = {
    "grpo": ("train", "GRPO", TrainConfig),
    "sft": ("sft", "supervised fine-tuning", SftConfig),
}
"""Command, method and configuration class of each stage, by the section of settings that only this stage has."""
ACCURACY = re.compile(r"eval/[^/]+/(accuracy|(pass|maj)@\d+)")
_MEASURED = re.compile(r"eval/[^/]+/(?!stderr)[^/]+")
_MOST_ROWS = 12
"""Maximum number of rows in the table of evaluations during the run."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Measurement:
    name: str
    value: float
    before: float | None = None
    """The same measurement for the model that `Evaluation.against` names."""
    interval: Interval | None = None
    """Bounds of the 95 % interval."""


@dataclass(frozen=True)
class Evaluation:
    numbers: list[Measurement]
    how: str
    """How the numbers and their intervals were measured, in a sentence or two."""
    against: str = "starting model"
    """Name of the model for which `Measurement.before` was measured."""

    def table(self) -> list[list[str]]:
        """Return a header and a row for each measurement; the other model's column is left out if it is empty."""
        rows = [["number", self.against, "this model", "95 % interval"], *map(_row, self.numbers)]
        return rows if any(row[1] for row in rows[1:]) else [[row[0], *row[2:]] for row in rows]

    @classmethod
    def printed(cls, output: Mapping[str, Any]) -> Self:
        """Make an evaluation from what `hybrid-grpo eval` printed; anything else raises errors such as KeyError."""
        bounds, against = output["intervals"], output.get("against", {})
        numbers = [
            Measurement(name, float(value), against.get(name), tuple(bounds[name]) if bounds.get(name) else None)
            for name, value in output.items()
            if _MEASURED.fullmatch(name)
        ]
        other = _spelled(against["model"], looks_like_path(against["model"])) if against else ""
        return cls(numbers, "Measured by `hybrid-grpo eval`; intervals by a bootstrap over prompts.", other)


@dataclass(frozen=True)
class TrainedRun:
    """The folder of a run, and the model to publish. Properties raise UserError if `folder` is not a run's folder."""

    folder: Path
    model: Path
    """Folder of the model that the run exported."""

    @cached_property
    def settings(self) -> dict[str, Any]:
        return read_recipe(self.folder / "config.yaml")

    @cached_property
    def stage(self) -> tuple[str, str, Any]:
        """Command, method and configuration class of the run's training stage."""
        for section, stage in _STAGES.items():
            if section in self.settings:
                return stage
        raise UserError(f"{self.folder / 'config.yaml'} belongs to no stage of training: give the folder of a run")

    @cached_property
    def facts(self) -> dict[str, str]:
        """The comments at the head of config.yaml, by name, without secrets and local folders."""
        text = (self.folder / "config.yaml").read_text(encoding="utf-8")
        for was in sorted(set(_texts(self.settings)), key=len, reverse=True):
            text = text.replace(was, publishable(was)) if publishable(was) != was else text
        return dict(re.findall(r"^# ([\w ]+): (.+)$", publishable_text(text), re.MULTILINE))

    @property
    def is_chat(self) -> bool:
        """Whether the model reads its prompts through a chat template."""
        files = [self.model / name for name in ("chat_template.jinja", "tokenizer_config.json")]
        has_template = any("chat_template" in path.name + path.read_text("utf-8") for path in files if path.exists())
        return has_template and self.settings.get("data", {}).get("chat_template") != "never"

    @property
    def step(self) -> int:
        return int(exported(self.model)["step"])

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl up to the step of the model. If the run has gone back to before that step, the
        model's own measurement, which was exported with it, takes the place of the step's line."""
        facts: dict[str, Any] = exported(self.model)
        lines = [line for line in read_jsonl(self.folder / "metrics.jsonl") if line["step"] <= self.step]
        last = lines[-1] if lines else {}
        if all(math.isclose(last.get(name, math.nan), value, rel_tol=1e-6) for name, value in facts.items()):
            return lines
        return [*(line for line in lines if line["step"] < self.step), facts]

    @property
    def recipe(self) -> str:
        """The text of config.yaml, with the comments at its head, without secrets and local folders."""
        head = "".join(f"# {name}: {fact}\n" for name, fact in self.facts.items())
        return head + _as_yaml(publishable(self.settings))

    @cached_property
    def place(self) -> Path:
        """The folder to which the run's paths are relative, inferred from the location of the run's folder."""
        run = self.settings.get("run", {})
        own, here = Path(run.get("dir", "")) / run.get("name", ""), self.folder.resolve()
        is_below = not own.is_absolute() and here.parts[-len(own.parts) :] == own.parts
        return here.parents[len(own.parts) - 1] if is_below else Path()

    def is_local(self, name: str) -> bool:
        """Return whether a model or data set named in the settings is on this machine rather than on the hub."""
        return looks_like_path(name) or (self.place / name).exists()

    @cached_property
    def ancestors(self) -> list[str]:
        """The starting model; if another run trained it, also the model from which that run started, and so on."""
        models = [str(self.settings["policy"]["model"])]
        while (recipe := (self.place / models[-1]).parent / "config.yaml").is_file():
            model = str(read_recipe(recipe).get("policy", {}).get("model", ""))
            if not model or model in models:
                break
            models.append(model)
        return models

    @property
    def data_sets(self) -> list[str]:
        """The training data sets that are on the hub."""
        data = self.settings.get("data", {})
        paths = [data.get("path"), *(source.get("path") for source in data.get("mixture") or [])]
        return list(dict.fromkeys(path for path in paths if path and not self.is_local(path)))

    def source_of(self, held_out: str) -> str:
        """Return the hub name of a held-out set's data, or the set's own name if its data is not on the hub."""
        data, given = self.settings.get("data", {}), self.settings.get("eval", {}).get("sets", {}).get(held_out)
        if given is not None and given.get("task") in READY_MADE:
            data = ready_made_settings(given["task"]).get("data", {})
        source = (given or {}).get("path") or data.get("eval_path") or data.get("path")
        return held_out if not source or self.is_local(source) else source

    def evaluation(self) -> Evaluation:
        """Return the run's own latest measurements on held-out data, up to the step of the model."""
        numbers = []
        for name in dict.fromkeys(name for line in self.lines for name in line if _MEASURED.fullmatch(name)):
            lines = [line for line in self.lines if line.get(name) is not None]
            if lines:
                before = lines[0][name] if lines[0]["step"] == 0 < lines[-1]["step"] else None
                numbers.append(Measurement(name, lines[-1][name], before, _interval(name, lines[-1])))
        return Evaluation(
            numbers,
            "Means over the held-out data, measured by the run. The interval of an accuracy of completions is 1.96"
            " standard errors on either side; it is missing if all prompts had the same result.",
        )


def write_card(path: Path, run: TrainedRun, evaluation: Evaluation, name: str, license: str | None) -> None:
    """Write the model card of a run, which shows the picture curves.svg if that is in the same folder. The model can
    be loaded under `name`."""
    command, method, cls = run.stage
    head = ModelCardData(
        base_model=None if run.is_local(run.ancestors[-1]) else run.ancestors[-1], datasets=run.data_sets or None,
        library_name="transformers", license=license, pipeline_tag="text-generation",
        tags=["hybrid_grpo", "grpo" if command == "train" else command], model_name=run.folder.resolve().name,
        eval_results=_results(run, evaluation.numbers) or None,
    )  # fmt: skip
    card = ModelCard.from_template(
        head, template_path=str(Path(__file__).with_name("card.md.j2")), title=run.folder.resolve().name, name=name,
        command=command, method=method, step=run.step, steps=run.settings.get("run", {}).get("steps"),
        starts=[_spelled(model, run.is_local(model)) for model in run.ancestors], is_chat=run.is_chat,
        system=run.settings.get("data", {}).get("system_prompt"), has_adapter=(run.model / "adapter").is_dir(),
        numbers=evaluation.table() if evaluation.numbers else [], measured=evaluation.how,
        best=[(name, value) for name, value in exported(run.model).items() if name != "step"],
        evaluations=_evaluations(run), curves=(path.parent / "curves.svg").exists(), facts=run.facts,
        data={name: fact for name, fact in run.facts.items() if name == "data" or name.startswith("held out")},
        mixture=publishable(run.settings.get("data", {}).get("mixture") or []),
        changed=_as_yaml(publishable(differing(run.settings, to_dict(cls())))), ranks=int(run.facts.get("ranks", "1")),
    )  # fmt: skip
    path.write_text(f"{card}\n", encoding="utf-8")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _as_yaml(settings: Any) -> str:
    return yaml.dump(settings, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


def _interval(name: str, line: Mapping[str, float]) -> Interval | None:
    """Return the interval of 1.96 standard errors on either side of an accuracy. None if there is no standard error or
    if it is 0, which means that all prompts had the same result, not that the accuracy is exact."""
    stage, _, number = name.rpartition("/")
    error = line.get(f"{stage}/stderr") if number == "accuracy" else None
    return (max(0.0, line[name] - 1.96 * error), min(1.0, line[name] + 1.96 * error)) if error else None


def _row(number: Measurement) -> list[str]:
    name = number.name.removeprefix("eval/")
    low_high = f"{number.interval[0]:.3f} to {number.interval[1]:.3f}" if number.interval else ""
    return [name, "" if number.before is None else f"{number.before:.3f}", f"{number.value:.3f}", low_high]


def _evaluations(run: TrainedRun) -> tuple[list[str], list[list[str]]]:
    """Return the names of the accuracies, and a table row for each of at most `_MOST_ROWS` steps that measured any."""
    names = list(dict.fromkeys(name for line in run.lines for name in line if ACCURACY.fullmatch(name)))
    lines = [line for line in run.lines if any(line.get(name) is not None for name in names)]
    if len(lines) > _MOST_ROWS:
        last = len(lines) - 1
        lines = [lines[round(row * last / (_MOST_ROWS - 1))] for row in range(_MOST_ROWS)]
    rows = [[f"{line['step']:,}", *("" if line.get(n) is None else f"{line[n]:.3f}" for n in names)] for line in lines]
    return [name.removeprefix("eval/") for name in names], rows


def _results(run: TrainedRun, numbers: list[Measurement]) -> list[EvalResult]:
    """Return the accuracies in the hub's format."""
    results = []
    for number in numbers:
        if ACCURACY.fullmatch(number.name) and math.isfinite(number.value):
            held_out, _, metric = number.name.removeprefix("eval/").rpartition("/")
            results.append(EvalResult("text-generation", run.source_of(held_out), held_out, metric, number.value))
    return results


def differing(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from the defaults, by section, without those of `About.is_place`."""
    changed: dict[str, Any] = {}
    for section, values in settings.items():
        usual = defaults.get(section, {})
        if isinstance(values, Mapping):
            own = {name: value for name, value in values.items() if value != usual.get(name)}
            own = {name: value for name, value in own.items() if not about(f"{section}.{name}").is_place}
            changed |= {section: own} if own else {}
        elif values and not about(section).is_place:
            changed[section] = values
    return changed


def _spelled(model: str, is_local: bool) -> str:
    """Return the text that names a model in the card: its hub name, or the name of its run or folder."""
    if not is_local:
        return f"[{model}](https://huggingface.co/{model})"
    path = Path(model)
    return f"`{(path.parent if path.name.startswith('model') and path.parent.name else path).name}`"
