import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import wandb_file
from forks import Done
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from workshop import Workshop

from hybrid_grpo.__main__ import main
from hybrid_grpo.records.metrics.catalogue import describe
from hybrid_grpo.records.metrics.statistics import compare

pytestmark = pytest.mark.process


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop(tmp_path_factory.mktemp("workshop"))
    workshop.write("noprompt.jsonl", '{"question": "a=", "answer": "a"}\n')
    yield workshop
    workshop.close()


# Mistakes -------------------------------------------------------------------------------------------------------------


def _train(*arguments: str) -> list[str]:
    return ["train", "--config", "train.yaml", *arguments]


def _reward(function: str) -> list[str]:
    return ["--rewards", f"[{{function: '{function}'}}]"]


NO_PROMPTS = _train("--data.path=noprompt.jsonl"), ["data.prompt_column prompt", "question"]
MISTAKES = [
    (_train("--rollout.num_generations=1"), ["rollout.num_generations 1", "2 or more"]),
    NO_PROMPTS,
    (_train(*_reward("broken_rewards.py:reward")), ["broken_rewards.py:1", "a_module_that_is_not_there"]),
]
"""Of each stage one: arguments, and words of the line. One rank has those of tests/config/test_bad_inputs.py."""


def test_no_arguments_give_the_commands_and_status_2(workshop: Workshop) -> None:
    done = workshop.run()
    assert done.status == 2
    for command in ("train", "sft", "eval", "report"):
        assert f"\n  {command} " in done.out
    assert workshop.run("--help").out == done.out


# Mistakes on several ranks --------------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize(("arguments", "says"), MISTAKES)
def test_one_rank_says_it(workshop: Workshop, arguments: list[str], says: list[str]) -> None:
    done = workshop.run(*arguments, "--run.name=ranks", ranks=2)
    assert done.status == 2
    (line,) = done.err.splitlines()
    assert line.startswith("hybrid-grpo: error: ")
    assert [words for words in says if words not in line] == []


@pytest.mark.ranks
def test_the_launcher_ends_with_the_line_about_a_mistake(workshop: Workshop) -> None:
    arguments, says = NO_PROMPTS
    done = workshop.launch(*arguments, "--run.name=launched", ranks=1)
    assert done.status != 0
    (line,) = [line for line in done.err.splitlines() if "error:" in line]
    assert line.startswith("hybrid-grpo: error: ") and all(words in line for words in says)
    assert "Traceback" not in done.err


@pytest.mark.ranks
def test_a_reward_that_fails_on_one_rank_only_ends_the_run_on_all(workshop: Workshop) -> None:
    arguments = _train(*_reward("my_rewards.py:raises"), "--scoring.max_failed_frac=0.25", "--run.name=one_rank")
    done = workshop.run(*arguments, "--data.eval_path=null", ranks=2, BAD_RANK="1")
    assert done.status != 0 and done.seconds < 120
    lines = [line for line in done.err.splitlines() if line.startswith("hybrid-grpo")]
    says = "error: rewards: raises failed on 8 of 16 completions, more than scoring.max_failed_frac 0.25: "
    assert lines and all(line.partition(": ")[2].startswith(says) for line in lines)
    assert done.err.count("rewards: raises raised ValueError: no luck with this (my_rewards.py:9).") == 1


# Runs -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Runs:
    """The folder of a run in one go, what `eval` and `report` say of it, and another one."""

    whole: Path
    stopped: Done
    """Whose reward failed in the third step; `mended` went on."""
    mended: Path
    evaluation: Done
    report: Done
    report_before: str


MOVING = (
    *("--grpo.beta=0.1", "--grpo.kl_target=0.001"),
    *("--grpo.ref_every=1", "--grpo.ref_mix=0.5"),
    "--eval.sets.sampled={limit: 4, num_generations: 4, temperature: 1.0, every: 4}",
)
"""A stateful objective, a reference that follows the policy, an adapted weight of the KL, and two held-out sets."""


@pytest.fixture(scope="session")
def runs(workshop: Workshop) -> Runs:
    """Four steps in one go, and four of which the third one fails at first."""

    def mended() -> tuple[Done, Path]:
        broken = workshop.write("broken", "")
        fragile = "{function: 'my_rewards.py:early_letters_unless_broken', name: early_letters}"
        rewards = f"[{fragile}, {{function: exact_match, weight: 0.5}}]"
        arguments = _train("--run.name=mended", "--rewards", rewards, "--eval.every=2", *MOVING)
        stopped = workshop.run(*arguments)
        broken.unlink()
        done = workshop.run(*arguments, "--run.resume=auto")
        assert done.status == 0, done.err
        return stopped, workshop.folder / "runs" / "mended"

    fragile = workshop.later(mended)
    done = workshop.run(*_train("--run.name=whole", "--engine.zero_stage=0", "--eval.every=2", *MOVING))
    assert done.status == 0, done.err
    whole = workshop.folder / "runs" / "whole"
    compared = ("--eval.against=model", "--eval.output=answers.jsonl")
    evaluation = workshop.later(lambda: workshop.run("eval", "--config", str(whole / "config.yaml"), *compared))
    report_before = (whole / "report.html").read_text()
    (whole / "report.html").unlink()
    return Runs(whole, *fragile.result(), evaluation.result(), workshop.run("report", str(whole)), report_before)


def rows_of(folder: Path) -> dict[int, dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps))
    return {row["step"]: row for row in rows}


def test_a_run_leaves_its_folder(runs: Runs) -> None:
    folder = runs.whole
    for name in ("config.yaml", "deepspeed.json", "metrics.jsonl", "report.html", "model/config.json"):
        assert (folder / name).stat().st_size > 0
    head = (folder / "config.yaml").read_text()
    assert "# batch: 1 rank x 4 prompts x 4 completions = 16 completions a step" in head and "# versions: " in head
    assert json.loads((folder / "deepspeed.json").read_text())["zero_optimization"]["stage"] == 0
    names = [path.name for path in sorted((folder / "rollouts").iterdir())]
    assert names == [f"step_{step:06d}.{kind}" for step in range(1, 5) for kind in ("jsonl", "parquet")]
    for path in (folder / "rollouts").glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(lines) == 16
        assert {"prompt", "completion", "rewards", "advantage", "finish"} <= lines[0].keys()
        assert lines[0]["rewards"].keys() == {"early_letters", "exact_match"}


def test_every_metric_of_a_run_is_in_the_catalogue(runs: Runs) -> None:
    rows = rows_of(runs.whole)
    assert list(rows) == [0, 1, 2, 3, 4]
    for row in rows.values():
        for name in row.keys() - {"step"}:
            assert describe(name).meaning
    for step in (1, 2, 3, 4):
        assert {"reward/mean", "policy/loss", "policy/grad_norm", "time/step_s"} <= rows[step].keys()
    assert [step for step, row in rows.items() if "eval/heldout/accuracy" in row] == [0, 2, 4]
    assert [step for step, row in rows.items() if "eval/sampled/pass@4" in row] == [0, 4]
    assert any(rows[step]["policy/grad_norm"] > 0 for step in (1, 2, 3, 4))


def test_the_exported_model_loads_and_has_learned(workshop: Workshop, runs: Runs) -> None:
    model = AutoModelForCausalLM.from_pretrained(runs.whole / "model")
    start = AutoModelForCausalLM.from_pretrained(workshop.folder / "model")
    assert model.state_dict().keys() == start.state_dict().keys()
    changed = [name for name, weight in start.state_dict().items() if not weight.equal(model.state_dict()[name])]
    assert len(changed) > len(start.state_dict()) // 2
    tokenizer = AutoTokenizer.from_pretrained(runs.whole / "model")
    assert tokenizer("dcab=")["input_ids"] == [6, 5, 3, 4, 2]


def test_eval_of_the_exported_model_repeats_the_last_evaluation(runs: Runs) -> None:
    assert runs.evaluation.status == 0, runs.evaluation.err
    said = json.loads(runs.evaluation.out)
    assert Path(said["model"]).parts[-1] == "model" and f"model: {said['model']}" in runs.evaluation.err
    last = rows_of(runs.whole)[4]
    for name in ("accuracy", "length_mean", "clipped_frac"):
        assert said[f"eval/heldout/{name}"] == last[f"eval/heldout/{name}"]
    assert said["eval/heldout/reward_mean"] == pytest.approx(last["eval/heldout/reward_mean"], rel=1e-6)
    # Sampled completions are those of step 4, and of the starting model those of step 0.
    first = rows_of(runs.whole)[0]
    for name in [name for name in last if name.startswith("eval/sampled/")]:
        assert said[name] == pytest.approx(last[name], rel=1e-6)
        assert said["against"][name] == pytest.approx(first[name], rel=1e-6)


def test_eval_says_how_sure_it_is_and_compares_two_models(workshop: Workshop, runs: Runs) -> None:
    said = json.loads(runs.evaluation.out.strip().splitlines()[-1])
    answers = [json.loads(line) for line in (workshop.folder / "answers.jsonl").read_text().splitlines()]
    assert [(row["model"], row["set"]) for row in answers[::9]] == [(said["model"], "heldout"), ("model", "heldout")]
    for number, value in (("accuracy", "right"), ("reward_mean", "reward")):
        name, means = f"eval/sampled/{number}", {}
        for model in (said["model"], "model"):
            rows = [row for row in answers if row["model"] == model and row["set"] == "sampled"]
            assert [row["id"] for row in rows] == [0, 1, 2, 3] and all(len(row["samples"]) == 4 for row in rows)
            means[model] = [sum(sample[value] for sample in row["samples"]) / 4 for row in rows]
        assert said[name] == pytest.approx(sum(means[said["model"]]) / 4)
        compared = compare(means[said["model"]], means["model"])
        assert said["differences"][name]["difference"] == pytest.approx(compared.difference)
        assert said["differences"][name]["p"] == pytest.approx(compared.p) and said["differences"][name]["prompts"] == 4
    low, high = said["intervals"]["eval/heldout/accuracy"]
    assert 0 <= low <= said["eval/heldout/accuracy"] <= high <= 1
    for shown in ("heldout/accuracy", "95 % interval", "sampled/pass@4", "sampled/maj@4", "difference"):
        assert shown in runs.evaluation.err


def test_a_run_is_published_with_its_evaluation(
    workshop: Workshop, runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The card has the numbers of `eval` beside those of the base."""
    monkeypatch.chdir(workshop.folder)
    workshop.write("evaluation.json", runs.evaluation.out)
    run = runs.whole.relative_to(workshop.folder)
    place = ["--publish.folder=published", "--publish.evaluation=evaluation.json"]
    assert main(["publish", str(run), *place]) == 0 and capsys.readouterr().out == "published\n"
    said = json.loads(runs.evaluation.out.strip().splitlines()[-1])
    card = ModelCard.load("published/README.md")
    results = {
        f"eval/{result.dataset_name}/{result.metric_type}": result.metric_value for result in card.data.eval_results
    }
    assert len(results) == 5 and results == {name: said[name] for name in results}
    low, high = said["intervals"]["eval/heldout/accuracy"]
    before, after = said["against"]["eval/heldout/accuracy"], said["eval/heldout/accuracy"]
    assert f"| heldout/accuracy | {before:.3f} | {after:.3f} | {low:.3f} to {high:.3f} |" in card.text


def test_report_writes_the_report_again(runs: Runs) -> None:
    assert runs.report.status == 0, runs.report.err
    assert runs.report.out.strip() == str(runs.whole / "report.html")
    assert (runs.whole / "report.html").read_text() == runs.report_before


def test_a_run_whose_rewards_fail_stops_with_a_checkpoint_and_goes_on_when_they_are_mended(runs: Runs) -> None:
    assert runs.stopped.status == 2
    told, *_, last = runs.stopped.err.splitlines()
    assert told.startswith(
        "rewards: early_letters raised OSError: no service (my_rewards.py:14). The completion of row"
    )
    assert last == (
        "hybrid-grpo: error: rewards: early_letters failed on 16 of 16 completions, more than scoring.max_failed_frac"
        " 0.5: the first failures are printed above; fix the function and continue with --run.resume auto; the run is"
        " saved as it was after step 3"
    )
    whole, mended = rows_of(runs.whole), rows_of(runs.mended)
    assert list(mended) == list(whole)
    assert len({whole[step]["policy/kl_coef"] for step in (1, 2, 3, 4)}) == 4 and whole[4]["policy/kl"] > 0
    for step, row in whole.items():
        same = {name for name in row if not name.startswith(("time/", "throughput/", "memory/"))}
        assert {name: mended[step].get(name) for name in same} == {name: row[name] for name in same}, step
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (runs.whole, runs.mended)]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


def test_wandb_offline_and_the_comms_logger_leave_what_they_saw(workshop: Workshop) -> None:
    options = ["--run.name=sft", "--log.wandb=offline", "--engine.deepspeed.comms_logger.enabled=true"]
    done = workshop.run("sft", "--config", "sft.yaml", *options, WANDB_SILENT="true")
    assert done.status == 0 and "Comm. Op" in done.out, done.err
    folder = workshop.folder / "runs" / "sft"
    (kept,) = wandb_file.of_kind(wandb_file.records(folder), "artifact")
    assert [file.path for file in kept.manifest.contents] == ["config.yaml", "report.html"]
    assert [row["step"] for row in rows_of(folder).values()] == [1, 2]
    AutoModelForCausalLM.from_pretrained(folder / "model")
