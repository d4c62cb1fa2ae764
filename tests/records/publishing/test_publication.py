"""What is published of a run: the model, its card, and nothing that strangers should not see."""

import inspect
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
import yaml
from char_tokenizer import TEMPLATE, char_tokenizer
from huggingface_hub import ModelCard
from tiny_models import build as build_model
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer

import hybrid_grpo as hg
from hybrid_grpo.__main__ import main
from hybrid_grpo.config import SftConfig, TrainConfig, build, dump

SECRET = "s3cret"
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"
HEAD = """\
# versions: python 3.11.7, torch 2.13.0
# ranks: 2
# data: /home/me/my data/train.jsonl [train]: 12 of 12 rows kept
# held out: https://me:s3cret@example.org/heldout?token=s3cret: 5 of 5 rows kept
"""
KWARGS = {
    **{
        "api_key": SECRET,
        "url": f"https://me:{SECRET}@example.org/score?sig={SECRET}&k=1",
        "header": f"Bearer {SECRET}",
    },
    **{"folder": "/home/me/cache/", "note": f"use {TOKEN}", "think": "/no_think"},
}  # fmt: skip
TRAIN: dict[str, Any] = {
    "run": {"name": "run", "steps": 5}, "policy": {"model": "some/base"},
    "data": {
        "mixture": [{"path": "some/questions", "weight": 3}, {"path": "/home/me/my data/train.jsonl", "name": "mine"}],
        "eval_path": "some/answers",
    },
    "grpo": {"beta": 0.01}, "rewards": [{"function": "/home/me/mine.py:right", "kwargs": KWARGS}],
    "eval": {"threshold": 0.5, "sets": {"hard": {"path": "/home/me/hard.jsonl"}, "gsm": {"task": "gsm8k"}}},
}  # fmt: skip
LINES: list[dict[str, Any]] = [
    {"step": 0, "eval/heldout/accuracy": 0.125, "eval/heldout/stderr": 0.1, "eval/hard/accuracy": 0.0},
    {"step": 1, "reward/mean": 0.25, "policy/lr": 1e-6},
    {"step": 2, "reward/mean": 0.5, "policy/lr": 1e-6, "eval/heldout/accuracy": 0.75, "eval/heldout/stderr": 0.3},
    {
        **{"step": 4, "reward/mean": 1.0, "policy/lr": 1e-6, "eval/heldout/accuracy": 0.625},
        **{
            "eval/heldout/stderr": 0.0625,
            "eval/hard/accuracy": 0.25,
            "eval/hard/pass@4": 0.5,
            "eval/gsm/accuracy": 1.0,
        },
        **{"eval/heldout/length_mean": 7.5, "eval/gsm/stderr": 0.0},
    },
    {"step": 5, "reward/mean": 9.0, "eval/heldout/accuracy": 0.999},  # of steps after the model was exported
]
SFT = {"policy": {"model": "some/base"}, "data": {"path": "some/pairs"}, "sft": {"batch_size": 2}}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    build_model(tiny_config("qwen2", vocab_size=80)).save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text(
        '{"r": 8, "base_model_name_or_path": "/home/me/models/base"}'
    )
    return folder


def make_run(folder: Path, weights: Path, config: Any, lines: list[dict[str, Any]], step: int = 4) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(HEAD + dump(replace(config, run=replace(config.run, name=folder.name))))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.copytree(weights, folder / "model")
    (folder / "model" / "run.json").write_text(json.dumps({"step": step}))
    return folder


@pytest.fixture
def run(tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run, and the folder above it is the working folder."""
    monkeypatch.chdir(tmp_path)
    return make_run(tmp_path / "runs" / "run", weights, build(TrainConfig, TRAIN), LINES).relative_to(tmp_path)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def table(card: str, head: str) -> list[list[str]]:
    """The rows of a table of the card, with its head."""
    lines = card[card.index(head) :].splitlines()
    rows = lines[: next((number for number, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_a_summary_for_an_issue_is_short_and_says_nothing_that_strangers_should_not_see(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alarm = {"step": 4, "since": 4, "until": 4, "alarm": "", "message": f"/home/me/out.txt are equal, use {TOKEN}"}
    again = {**alarm, "step": 5, "until": 5, "alarm": "duplicates", "message": "duplicates: once more"}
    ended = {**again, "step": 4, "until": 4, "message": ""}
    told = [alarm, {**again, "step": 2, "until": None}, ended, again]
    (run / "alarms.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in told))
    before = files(run)
    assert main(["report", str(run), "--text"]) == 0
    text = capsys.readouterr().out
    assert all(secret not in text for secret in (SECRET, TOKEN, "/home/me")), text
    lines = text.splitlines()
    assert len(lines) < 40 and max(map(len, lines)) < 210 and files(run) == before
    for line in (
        *("hybrid-grpo train (GRPO): 5 of 5 steps, finished", "versions: python 3.11.7, torch 2.13.0", "ranks: 2"),
        *("policy.model: some/base", "grpo.beta: 0.01", "eval.threshold: 0.5", "alarms: 3"),
        "reward/mean: 0.25 -> 9 (median 0.75 of 4)",
        "eval/heldout/accuracy: 0.125 -> 0.999 (median 0.6875 of 4)",
        "  step 4: out.txt are equal, use ***",
        "  step 5: duplicates: once more (2 times)",
    ):
        assert line in lines, line
    assert not any(line.startswith("policy.lr:") for line in lines), "it has its default"
    (run / "alarms.jsonl").unlink()
    with (run / "metrics.jsonl").open("a") as metrics:
        print(json.dumps({"step": 6, "health/closest/entropy_collapse": 0.978}), file=metrics)
    assert main(["report", str(run), "--text"]) == 0
    assert "alarms: none\n  closest: entropy_collapse, 98% of the way to its limit at step 6" in capsys.readouterr().out
    shutil.rmtree(run / "model")
    (run / "metrics.jsonl").write_text("")
    assert main(["report", "--text", str(run)]) == 0
    assert capsys.readouterr().out.startswith("hybrid-grpo train (GRPO): 0 of 5 steps, not finished\n")


def test_the_card_says_what_the_run_measured(run: Path) -> None:
    assert hg.publish(run, folder="out", license="mit") == "out"
    card = ModelCard.load("out/README.md")
    head = card.data
    assert (head.base_model, head.datasets, head.license) == ("some/base", ["some/questions"], "mit")
    assert (head.library_name, head.pipeline_tag, head.tags) == (
        "transformers",
        "text-generation",
        ["hybrid_grpo", "grpo"],
    )
    # Numbers of the step of the model, and not of a later one.
    results = {(r.dataset_name, r.metric_type): (r.dataset_type, r.metric_value) for r in head.eval_results}
    assert results == {
        ("heldout", "accuracy"): ("some/answers", 0.625),
        ("hard", "accuracy"): ("hard", 0.25),
        ("hard", "pass@4"): ("hard", 0.5),
        ("gsm", "accuracy"): ("openai/gsm8k", 1.0),
    }
    assert table(card.text, "| number |")[2:] == [
        ["heldout/accuracy", "0.125", "0.625", f"{0.625 - 1.96 / 16:.3f} to {0.625 + 1.96 / 16:.3f}"],
        ["hard/accuracy", "0.000", "0.250", ""],
        ["hard/pass@4", "", "0.500", ""],
        ["gsm/accuracy", "", "1.000", ""],
        ["heldout/length_mean", "", "7.500", ""],
    ]
    assert [row[:3] for row in table(card.text, "| step |")[2:]] == [
        ["0", "0.125", "0.000"],
        ["2", "0.750", ""],
        ["4", "0.625", "0.250"],
    ]
    assert "after 4 steps of GRPO with hybrid_grpo, of 5 planned." in card.text
    assert "deepspeed --num_gpus 2 --no_local_rank --module hybrid_grpo train --config config.yaml" in card.text
    settings = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", card.text, re.DOTALL)[0])
    assert settings["grpo"] == {"beta": 0.01} and settings["eval"]["threshold"] == 0.5
    assert settings.keys() == {"run", "data", "grpo", "rewards", "eval"} and settings["run"] == {"steps": 5}
    assert "- data: train.jsonl [train]: 12 of 12 rows kept" in card.text


@pytest.mark.parametrize("use, template, prompt", [
    ("auto", None, "aprompt"),
    ("auto", TEMPLATE, "<bos><system>be,brief<user>amessage<assistant>"),
    ("never", TEMPLATE, "aprompt"),
])  # fmt: skip
def test_the_card_shows_how_the_model_is_prompted(
    run: Path, capsys: pytest.CaptureFixture[str], use: str, template: str | None, prompt: str
) -> None:
    """A chat model's card handed it a text without its template, as one that nobody had trained it on."""
    tokenizer = char_tokenizer(template)
    tokenizer.save_pretrained(run / "model")
    data = {"chat_template": use, "system_prompt": "be, brief" if prompt[0] == "<" else None}
    train = {**TRAIN, "data": {**TRAIN["data"], **data}}
    (run / "config.yaml").write_text(HEAD + dump(build(TrainConfig, train)))
    hg.publish(run, folder="out")
    (code,) = re.findall(r"```python\n(.*?)```", Path("out/README.md").read_text(), re.DOTALL)
    shown: dict[str, Any] = {}
    exec(code.replace("max_new_tokens=256", "max_new_tokens=2"), shown)
    assert tokenizer.decode(shown["inputs"]["input_ids"][0]).replace(" ", "") == prompt and capsys.readouterr().out


def test_the_published_model_loads(run: Path) -> None:
    hg.publish(run, folder="out")
    ours, theirs = (AutoModelForCausalLM.from_pretrained(folder) for folder in (run / "model", "out"))
    assert all(weight.equal(theirs.state_dict()[name]) for name, weight in ours.state_dict().items())
    assert (
        AutoTokenizer.from_pretrained("out")("ab")["input_ids"]
        == AutoTokenizer.from_pretrained(run / "model")("ab")["input_ids"]
    )
    assert {path.stat().st_mode & 0o777 for path in Path("out").rglob("*") if path.is_file()} == {0o644}
    assert set(files(Path("out"))) == {
        *(set(files(run / "model")) - {"run.json"}),
        *("README.md", "config.yaml", "curves.svg", "publication.json"),
    }


def test_nothing_that_strangers_should_not_see_is_published(run: Path) -> None:
    before = files(run / "model")
    hg.publish(run, folder="out")
    for name, content in files(Path("out")).items():
        for private in (SECRET, TOKEN, "/home", "my data"):
            assert private.encode() not in content, (name, private)
    published = yaml.safe_load(Path("out/config.yaml").read_text())
    assert published["rewards"][0] == {
        "function": "mine.py:right",
        "kwargs": {
            **{"api_key": "***", "url": "https://***@example.org/score?sig=***&k=1", "header": "Bearer ***"},
            **{"folder": "cache", "note": "use ***", "think": "/no_think"},
        },
    }
    assert published["data"]["mixture"][1]["path"] == "train.jsonl" and published["data"]["eval_path"] == "some/answers"
    assert json.loads(Path("out/adapter/adapter_config.json").read_text())["base_model_name_or_path"] == "base"
    assert files(run / "model") == before


def test_a_supervised_run(run: Path, weights: Path) -> None:
    lines = [{"step": 1, "sft/loss": 2.0}, {"step": 4, "sft/loss": 1.0}]
    make_run(Path("runs/other"), weights, build(SftConfig, SFT), lines)
    hg.publish("runs/other", folder="out")
    head = ModelCard.load("out/README.md").data
    assert (head.tags, head.pipeline_tag) == (["hybrid_grpo", "sft"], "text-generation")
    assert not head.eval_results and head.datasets == ["some/pairs"]


def test_a_model_trained_in_stages_names_the_one_that_all_began_with(run: Path, weights: Path) -> None:
    """Wherever it is published from: paths of a run are relative to where it was started."""
    second = {**TRAIN, "run": {"name": "second"}, "policy": {"model": "runs/run/model"}}
    make_run(Path("runs/second"), weights, build(TrainConfig, second), LINES)
    hg.publish("runs/second", folder="out")
    card = ModelCard.load("out/README.md")
    assert card.data.base_model == "some/base"
    assert "`run` (trained from [some/base](https://huggingface.co/some/base)) after 4 steps" in card.text


def test_a_local_model_is_no_name_of_the_hub(run: Path, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("some/base").mkdir(parents=True)
    monkeypatch.chdir(run)
    hg.publish(".", folder="../out")
    assert ModelCard.load("../out/README.md").data.base_model is None


def test_the_best_model_and_an_evaluation_of_it(run: Path) -> None:
    shutil.copytree(run / "model", run / "model_best")
    (run / "model_best" / "run.json").write_text('{"step": 2, "eval/heldout/accuracy": 0.75}')
    said = {
        **{"model": "runs/run/model_best", "eval/math/accuracy": 0.5, "eval/math/reward_mean": 0.25},
        **{"intervals": {"eval/math/accuracy": [0.375, 0.625], "eval/math/reward_mean": None}},
        **{"against": {"model": "some/base", "eval/math/accuracy": 0.125}},
    }
    Path("eval.json").write_text("model: a line of its own\n" + json.dumps(said) + "\n")
    hg.publish(run, folder="out", model="model_best", evaluation="eval.json")
    card = ModelCard.load("out/README.md")
    assert table(card.text, "| number |") == [
        ["number", "[some/base](https://huggingface.co/some/base)", "this model", "95 % interval"],
        ["---"] * 4,
        ["math/accuracy", "0.125", "0.500", "0.375 to 0.625"],
        ["math/reward_mean", "", "0.250", ""],
    ]
    assert [(r.dataset_name, r.metric_value) for r in card.data.eval_results] == [("math", 0.5)]
    assert "highest eval/heldout/accuracy (0.750)" in card.text and "after 2 steps" in card.text
    # A run that goes back repeats the step of its best model: the card had the numbers of the repeated step.
    (run / "model_best" / "run.json").write_text('{"step": 2, "eval/heldout/accuracy": 0.5}')
    hg.publish(run, folder="repeated", model="model_best")
    rows = table(ModelCard.load("repeated/README.md").text, "| number |")
    assert ["heldout/accuracy", "0.125", "0.500", ""] in rows


def test_an_earlier_publication_is_replaced_whole_or_stays(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hg.publish(run, folder="deep/out")
    first = files(Path("deep/out"))
    (run / "model" / "run.json").write_text('{"step": 2}')

    def full(source: Path, target: Path) -> None:
        if source.name == "model.safetensors":
            raise OSError(28, "No space left on device", target)
        target.write_bytes(source.read_bytes())

    with (
        monkeypatch.context() as patch,
        pytest.raises(hg.UserError, match=r"deep/out cannot be written: .*No space left"),
    ):
        patch.setattr(shutil, "copyfile", full)
        hg.publish(run, folder="deep/out")
    assert files(Path("deep/out")) == first and [path.name for path in Path("deep").iterdir()] == ["out"]
    hg.publish(run, folder="deep/out")
    assert "after 2 steps" in Path("deep/out/README.md").read_text()
    assert [path.name for path in Path("deep").iterdir()] == ["out"]
    # What a person has changed since is theirs.
    with Path("deep/out/README.md").open("a") as card:
        card.write("\nWritten by hand.\n")
    with pytest.raises(hg.UserError, match=r"publish.folder deep/out holds something other"):
        hg.publish(run, folder="deep/out")


REFUSED: dict[str, tuple[str, list[str], str]] = {
    "no run": ("there", ["--publish.folder=out"], "there is not the folder of a run: it has no config.yaml"),
    "no place": ("runs/run", [], "publish.hub and publish.folder: give one of them"),
    "two places": ("runs/run", ["--publish.folder=out", "--publish.hub=me/x"], "give one of them"),
    "unknown model": ("runs/run", ["--publish.folder=out", "--publish.model=modl"], "did you mean model?"),
    "not finished": ("runs/new", ["--publish.folder=out"], "runs/new: the run has no trained model yet"),
    "of no stage": ("runs/odd", ["--publish.folder=out"], "runs/odd/config.yaml belongs to no stage of training"),
    "a folder with files": ("runs/run", ["--publish.folder=runs"], "publish.folder runs holds something other"),
    "another model's numbers": (
        "runs/run", ["--publish.folder=out", "--publish.evaluation=eval.json"], "eval.json measures some/base, not",
    ),
    "no numbers": (
        "runs/run", ["--publish.folder=out", "--publish.evaluation=runs/run/config.yaml"], "is not what hybrid",
    ),
    "no owner": ("runs/run", ["--publish.hub=x"], "publish.hub x has no owner: give it as you/x"),
    "no name": ("runs/run", ["--publish.hub=me/a b"], "publish.hub me/a b cannot be written: "),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_published_is_refused(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for other, text in (("new", "grpo: {}"), ("odd", "run: {}")):
        shutil.copytree(run, f"runs/{other}")
        Path(f"runs/{other}/config.yaml").write_text(text)
    Path("runs/new/model/run.json").unlink()
    Path("eval.json").write_text('{"model": "some/base", "intervals": {}}')
    folder, arguments, says = REFUSED[name]
    before = files(Path())
    assert main(["publish", folder, *arguments]) == 2
    told = capsys.readouterr().err
    assert says in told and told.count("\n") == 1
    assert {path: content for path, content in files(Path()).items() if not path.endswith(".lock")} == before


class Hub:
    """Stands for the hub: what a repository holds, and what is asked of it."""

    def __init__(self, names: list[str], refuses: bool = False) -> None:
        self.names, self.refuses = names, refuses
        self.made: list[tuple[str, bool]] = []
        self.uploaded: dict[str, bytes] = {}

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> Any:
        _takes("create_repo", name, private=private, exist_ok=exist_ok)
        if self.refuses:
            request = httpx.Request("POST", "https://huggingface.co/api/repos/create")
            response = httpx.Response(403, request=request)
            raise huggingface_hub.errors.HfHubHTTPError("403 Forbidden\nfor this token", response=response)
        self.made.append((name, private))
        return SimpleNamespace(repo_id=name)

    def list_repo_files(self, name: str) -> list[str]:
        _takes("list_repo_files", name)
        return self.names

    def upload_folder(self, *, folder_path: Path, **arguments: Any) -> None:
        _takes("upload_folder", folder_path=folder_path, **arguments)
        self.uploaded, self.arguments = files(folder_path), arguments


def _takes(method: str, *arguments: Any, **keywords: Any) -> None:
    """Raises TypeError where the library's own method is called otherwise."""
    inspect.signature(getattr(huggingface_hub.hf_api.HfApi, method)).bind(None, *arguments, **keywords)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub([".gitattributes"])
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    return hub


def test_a_repository_of_the_hub_gets_what_a_folder_gets(
    run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(run)
    assert main(["publish", str(run), "--publish.hub=me/x"]) == 0
    assert capsys.readouterr().out == "https://huggingface.co/me/x\n"
    assert hub.made == [("me/x", True)] and hub.arguments["repo_id"] == "me/x"
    hg.publish(run, folder="x")
    named = {
        name: content for name, content in files(Path("x")).items() if name not in ("README.md", "publication.json")
    }
    assert {name: hub.uploaded[name] for name in named} == named and b'from_pretrained("me/x")' in hub.uploaded[
        "README.md"
    ]
    # The weights were linked and not copied; the run is as it was.
    assert {name: content for name, content in files(run).items() if name != ".lock"} == before
    hub.names = ["README.md", "publication.json"]
    hg.publish(run, hub="me/x", private=False)
    assert hub.made[-1] == ("me/x", False)


def test_the_hub_says_no(run: Path, hub: Hub) -> None:
    hub.names = ["README.md"]
    with pytest.raises(hg.UserError, match=r"publish.hub me/x has files that do not belong to a publication"):
        hg.publish(run, hub="me/x")
    hub.refuses = True
    with pytest.raises(
        hg.UserError, match=r"publish.hub me/x cannot be written: 403 Forbidden: check that .* publish.folder"
    ) as told:
        hg.publish(run, hub="me/x")
    assert TOKEN not in str(told.value)
    assert hub.uploaded == {} and not list(run.glob(".publication*"))
