"""Whatever a user gives: one line that names it and the way out, status 2, and nothing left behind.

Cases are in refused.yaml: a command line, and words of the line.
"""

import json
import os
import re
import shlex
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import bad_inputs
import forks
import pytest
import yaml
from bad_inputs import Ended
from refusals import TWO, refusal, refused
from workshop import Workshop

from hybrid_grpo import __main__ as program
from hybrid_grpo.config import TrainConfig

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def of_features(kind: str) -> Iterator[tuple[Any, ...]]:
    """The lines of features' own files, but for those about two features of which one was removed."""
    sections = {section.name for section in fields(TrainConfig)}
    for file in sorted(Path(__file__).parents[1].glob("features/*/bad_inputs.yaml")):
        for given, *says in yaml.safe_load(file.read_text()).get(kind, ()):
            if sections.issuperset(re.findall(r"--(\w+)\.", given) if isinstance(given, str) else given):
                yield given, *says


SETTINGS = [
    *refused("settings"),
    ("--run.name=\udcff", "an argument is not UTF-8: --run.name=\\udcff"),
    ("--run.name \udcff", "run.name is not UTF-8: \\udcff"),
    *of_features("settings"),
]
LOADED, FOUND_BY_LOADING = [*refused("loaded"), *of_features("loaded")], refused("found_by_loading")
"""The head of a run is written before its weights are read."""


@pytest.mark.parametrize("sections, says", of_features("sections"))
def test_sections_that_mean_nothing(sections, says):
    assert refusal(**{"rewards": TWO, **sections}).startswith(says)


def split(line: str) -> tuple[list[str], dict[str, str]]:
    """The arguments of a case, and its variables."""
    words = shlex.split(line)
    count = sum(word.partition("=")[0].isupper() for word in words if "=" in word)
    variables, words = dict(word.split("=", 1) for word in words[:count]), words[count:]
    return ["train", "--config", "train.yaml", *words] if words[0].startswith("--") else words, variables


def check(ended: Ended, says: tuple[str, ...]) -> None:
    assert ended.status == 2, ended.out[-1000:] + ended.err[-3000:]
    assert ended.err.startswith("hybrid-grpo") and ": error: " in ended.err, ended.err[-3000:]
    assert ended.err.count("\n") == 1 and "Traceback" not in ended.out
    assert all(words in ended.err for words in says), ended.err
    assert ended.seconds < 60
    assert not ended.left


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    workshop = Workshop(tmp_path_factory.mktemp("bad_inputs"))
    # Called by the rank itself: a fork server for each of a hundred cases would take a minute.
    recipe = yaml.safe_load((workshop.folder / "train.yaml").read_text())
    workshop.write("train.yaml", yaml.safe_dump({**recipe, "rewards": ["exact_match"]}))
    yield workshop
    workshop.close()


@pytest.fixture(scope="module")
def loaded(workshop: Workshop) -> dict[str, Ended]:
    """What came of every case for which something is loaded, all in one process."""
    lines = [line for line, *_ in LOADED + FOUND_BY_LOADING]
    workshop.write("cases.json", json.dumps([split(line) for line in lines]))
    script = [Path(bad_inputs.__file__), "cases.json", "results.json"]
    done = forks.run(*script, cwd=workshop.folder, timeout=600)
    assert done.status == 0, done.err[-3000:]
    results = json.loads((workshop.folder / "results.json").read_text())
    return {line: Ended(**result) for line, result in zip(lines, results, strict=True)}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """A folder with what a command looks at before it loads anything."""
    folder = tmp_path_factory.mktemp("settings")
    for name, content in {
        "model/config.json": "{}",
        "train.jsonl": "{}\n",
        "sft.yaml": "{policy: {model: model}}",
    }.items():
        bad_inputs.write(folder / name, content)
    recipe = {
        **{"policy": {"model": "model"}, "data": {"path": "train.jsonl"}, "rewards": ["exact_match"]},
        "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_tokens": 8},
    }
    bad_inputs.write(folder / "train.yaml", json.dumps(recipe))
    bad_inputs.make_settings(folder)
    return folder


@pytest.mark.parametrize("line, says", [(line, says) for line, *says in SETTINGS])
def test_a_setting_that_cannot_work(settings, monkeypatch, capsys, line, says):
    """Told before torch is needed."""
    monkeypatch.chdir(settings)
    monkeypatch.setattr(program, "_GRACE_SECONDS", 0.0)
    arguments, variables = split(line)
    kept = {name: value for name, value in os.environ.items() if name not in RANKS}
    with mock.patch.dict(os.environ, kept | variables, clear=True):
        start = time.monotonic()
        status = program.main(arguments)
    out, err = capsys.readouterr()
    check(Ended(status, out, err, time.monotonic() - start, (settings / "runs").exists()), says)
    assert not list(settings.glob(".hybrid_grpo_*"))


@pytest.mark.process
@pytest.mark.parametrize("line, says", [(line, says) for line, *says in LOADED])
def test_an_input_that_cannot_work(loaded, line, says):
    check(loaded[line], says)


@pytest.mark.process
@pytest.mark.parametrize("line, says", [(line, says) for line, *says in FOUND_BY_LOADING])
def test_weights_that_cannot_work(loaded, line, says):
    check(replace(loaded[line], left=False), says)


@pytest.mark.process
def test_code_of_a_model_is_not_run(loaded, workshop):
    assert not (workshop.folder / "code_has_run").exists()
