"""Where a run goes on from, what it refuses to go on from, and that it goes on as if it had never been interrupted."""

import json
import shutil
from pathlib import Path

import forks
import pytest
from paths import SUPPORT

from hybrid_grpo.config import TrainConfig
from hybrid_grpo.config.building import build
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.records.json_lines import read_jsonl
from hybrid_grpo.run import start as starts
from hybrid_grpo.run.saving.checkpoints import Checkpoints
from hybrid_grpo.run.saving.manifest import Manifest
from hybrid_grpo.run.settings import settings_of
from hybrid_grpo.run.start import find_start

SETTINGS = {"policy": {"model": "model"}, "run": {"name": "run", "steps": 8}, "rewards": [{"function": "exact_match"}]}


class Place:
    """A folder for runs, with checkpoints that hold a manifest and nothing else."""

    def __init__(self, folder):
        self.folder = folder
        self.said = []

    def config(self, changes=None):
        settings = {section: dict(v) if isinstance(v, dict) else v for section, v in SETTINGS.items()}
        settings["run"] = {"dir": str(self.folder), "resume": "auto", **settings["run"]}
        for name, value in (changes or {}).items():
            section, _, key = name.partition(".")
            if key:
                settings.setdefault(section, {})[key] = value
            else:
                settings[section] = value
        return build(TrainConfig, settings)

    def checkpoint(self, step, run="run", **changes):
        folder = self.folder / run / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        Manifest("id", step, 1, 0, settings_of(self.config(changes)), {}).write(folder)
        return folder

    def numbers(self, steps, run="run", tail=""):
        (self.folder / run).mkdir(exist_ok=True)
        text = "".join(json.dumps({"step": step, "reward/mean": step / 8}) + "\n" for step in steps)
        (self.folder / run / "metrics.jsonl").write_bytes(text.encode() + tail.encode("latin-1"))

    def start(self, inputs=None, **changes):
        config = self.config(changes)
        folder = self.folder / config.run.name
        checkpoints = Checkpoints(folder / "checkpoints", 2)
        checkpoints.inputs = inputs or {}
        return find_start(config, folder, checkpoints)

    def refusal(self, inputs=None, **changes):
        with pytest.raises(UserError) as caught:
            self.start(inputs, **changes)
        assert "\n" not in str(caught.value)
        return str(caught.value)


@pytest.fixture
def place(tmp_path, monkeypatch):
    place = Place(tmp_path)
    monkeypatch.setattr(starts, "say", place.said.append)
    return place


def test_an_empty_folder_is_a_new_run(place):
    for resume in ("auto", "never"):
        assert place.start(**{"run.resume": resume}).checkpoint is None
    (place.folder / "run").mkdir()
    # A run that was killed before its first checkpoint has written no numbers.
    place.numbers([])
    (place.folder / "run" / "config.yaml").write_text("")
    assert place.start().step == 0
    # The disk was full: there is what was measured before the first step, and part of a line.
    place.numbers([0], tail='{"step": 1, "rew')
    assert place.start().step == 0


def test_a_run_is_never_begun_over(place):
    """`auto` on a finished run without checkpoints started at step 1, and wrote over its metrics and model."""
    place.numbers(range(3))
    assert "holds a run already: pass --run.resume auto" in place.refusal(**{"run.resume": "never"})
    says = place.refusal()
    assert says.startswith(f"run.resume auto: {place.folder}/run holds the results of a run and no checkpoint")
    assert "another --run.name" in says
    (place.folder / "run" / "metrics.jsonl").unlink()
    (place.folder / "run" / "model").mkdir()
    assert "holds the results of a run and no checkpoint" in place.refusal()
    for step in (2, 4):
        (place.checkpoint(step) / "manifest.json").write_text("{}")
    says = place.refusal()
    assert says.startswith(f"run.resume auto: no checkpoint in {place.folder}/run/checkpoints is intact: step_000004: ")
    assert "step_000002: manifest.json is damaged" in says and "another --run.name" in says


def test_the_newest_whole_checkpoint_is_taken_and_the_numbers_after_it_are_left_out(place):
    place.checkpoint(2)
    (place.checkpoint(4) / "manifest.json").unlink()
    # The last lines are of a crash.
    place.numbers(range(6), tail='{"step": 6, "rew\x00\xff\n{"step"')
    start = place.start()
    assert (start.step, start.forks) == (2, False)
    assert [json.loads(line)["step"] for line in start.lines] == [0, 1, 2]
    (line,) = place.said
    assert line.startswith(f"WARNING: checkpoint {place.folder}/run/checkpoints/step_000004: manifest.json is missing")


@pytest.mark.parametrize("content, kept, says", [
    (None, [], "it lacks the numbers of step 1, 2, 3"),
    (b"", [], "it lacks the numbers of step 1, 2, 3"),
    (b"\x00\xff\xfe" * 99, [], "it lacks the numbers of step 1, 2, 3"),
    (b'{"step": 0}\n{"step": 1}\n{"step": 3}\n', [0, 1, 3], "it lacks the numbers of step 2"),
    (b'{"step": 1}\n{"step": 2, "a\n{"step": 3}\n', [1, 3], "it lacks the numbers of step 2"),
    (b'{"step": 1}\n[2]\n{"step": "2"}\n{"step": 3}\n', [1, 3], "it lacks the numbers of step 2"),
    (b'{"step": 1}\n{"step": 2}\n{"step": 3, "rew', [1, 2], "it lacks the numbers of step 3"),
    (b'{"step": 1}\n{"step": 2}\n{"step": 2}\n{"step": 3}\n{"step": 4', [1, 2, 3], "some of its lines are damaged"),
    (b'{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4', [1, 2, 3], ""),
])  # fmt: skip
def test_numbers_that_are_damaged_are_named_and_the_run_goes_on(place, content, kept, says):
    """A power cut had left part of a line, and the run was refused; a line that was there twice was written twice."""
    place.checkpoint(3)
    if content is not None:
        (place.folder / "run" / "metrics.jsonl").write_bytes(content)
    start = place.start()
    assert (start.step, start.is_damaged) == (3, bool(says))
    assert [json.loads(line)["step"] for line in start.lines] == kept
    path = place.folder / "run" / "metrics.jsonl"
    assert place.said == ([f"WARNING: {path}: {says}; the run continues without them"] if says else [])


def test_a_checkpoint_by_its_path(place):
    """Of this run, and of another one, whose numbers come along."""
    for step in (2, 4):
        place.checkpoint(step)
    place.numbers(range(6))
    path = str(place.folder / "run" / "checkpoints" / "step_000002")
    start = place.start(**{"run.resume": path})
    assert (start.step, start.forks) == (2, False)
    start = place.start(**{"run.resume": path, "run.name": "fork"})
    assert (start.step, start.forks, len(start.lines)) == (2, True, 3)
    place.checkpoint(2, run="fork")
    assert "holds a run already: give another --run.name" in place.refusal(**{"run.resume": path, "run.name": "fork"})
    (Path(path) / "manifest.json").unlink()
    assert "manifest.json is missing" in place.refusal(**{"run.resume": path})


FREE = {
    "run.steps": 12, "log.rollouts_every": 3, "checkpoint.every": 5, "eval.name": "other", "scoring.workers": 3,
    "alarms.kl": {"above": 5.0, "action": "stop"}, "alarms.numbers": {"completion/length_mean": {"above": 400}},
    "guard.lr_factor": 0.1, "engine.offload_optimizer": True, "engine.deepspeed": {"comms_logger": {"enabled": True}},
    "policy.micro_batch_tokens": 99, "policy.gradient_checkpointing": True, "rollout.max_slots": 7,
}  # fmt: skip
BOUND = {
    "policy.model": "other", "policy.lr": 1e-3, "policy.betas": [0.8, 0.9], "policy.dtype": "float32", "lora.rank": 4,
    "grpo.beta": 0.5, "grpo.num_iterations": 2, "rollout.num_generations": 4, "rollout.prompts_per_step": 64,
    "rollout.temperature": 0.5, "data.path": "other.jsonl", "run.seed": 1,
    "engine.deepspeed": {"optimizer": {"params": {"eps": 1e-5}}}, "eval.threshold": 0.5,
    "rewards": [{"function": "exact_match", "weight": 2.0}], "alarms.truncated": {"action": "skip"},
    "alarms.kl": {"action": "roll_back"},
    "alarms.numbers": {"completion/length_mean": {"above": 400, "action": "roll_back"}},
    "guard.non_finite": "roll_back",
}  # fmt: skip


def test_settings_that_decide_on_learning_may_not_change_unasked(place):
    place.checkpoint(2)
    place.numbers(range(3))
    assert place.start(rewards=[{"function": "exact_match", "timeout_s": 3.0}]).step == 2 and place.said == []
    for name, value in FREE.items():
        place.said.clear()
        assert place.start(**{name: value}).step == 2, name
        assert [line.partition(": ")[0] for line in place.said] == ["changed since the checkpoint"], name
        assert f" {name}" in place.said[0]
    for name, value in BOUND.items():
        says = place.refusal(**{name: value})
        assert f"have changed since the checkpoint of step 2: {name}" in says and "--run.allow_changes true" in says
        place.said.clear()
        assert place.start(**{name: value, "run.allow_changes": True}).step == 2, name
        assert f" {name}" in place.said[0]
    assert "policy.lr 1e-06 -> 0.001" in place.refusal(**{"policy.lr": 1e-3})


def test_what_an_alarm_learns_by_may_not_change_unasked(place):
    """Where an alarm skips or goes back, its limits decide what is learned, and so does how the guard goes back."""
    acting = {"alarms.truncated": {"action": "skip", "above": 0.5}, "alarms.kl": {"action": "roll_back"}}
    place.checkpoint(2, **acting)
    place.numbers(range(3))
    assert place.start(**acting, **{"alarms.parity": {"above": 1.0}, "guard.max_rollbacks": 9}).step == 2
    assert "alarms.truncated" in place.refusal(**{**acting, "alarms.truncated": {"action": "skip", "above": 0.6}})
    assert "alarms.kl" in place.refusal(**{**acting, "alarms.kl": {"action": "stop"}})
    assert "guard.lr_factor" in place.refusal(**acting, **{"guard.lr_factor": 0.1})


def test_the_length_of_a_run_may_grow_where_its_learning_rate_does_not_follow_it(place):
    place.checkpoint(4)
    place.checkpoint(2, **{"policy.lr_schedule": "linear"})
    place.numbers(range(5))
    assert place.start(**{"run.steps": 4}).step == 4
    assert "run.steps 3: " in place.refusal(**{"run.steps": 3})
    shutil.rmtree(place.folder / "run" / "checkpoints" / "step_000004")
    assert place.start(**{"policy.lr_schedule": "linear"}).step == 2
    assert "run.steps 8 -> 9" in place.refusal(**{"run.steps": 9, "policy.lr_schedule": "linear"})


def test_arguments_of_rewards_are_compared_and_secrets_are_not_kept(place):
    def rewards(key, scale):
        return [{"function": "exact_match", "kwargs": {"api_key": key, "scale": scale}}]

    text = (place.checkpoint(2, rewards=rewards("a-secret", 2)) / "manifest.json").read_text()
    place.numbers(range(3))
    assert "a-secret" not in text
    # Another key gives the same rewards.
    assert place.start(rewards=rewards("b-secret", 2)).step == 2 and place.said == []
    says = place.refusal(rewards=rewards("a-secret", 3))
    assert '"scale": 2' in says and '"scale": 3' in says and "a-secret" not in says


def test_inputs_that_changed_are_refused_and_changed_code_is_said(place):
    """What is missing on one side, as in checkpoints of before, is not compared."""
    inputs = {"training rows": "a", "policy.model weights": "b", "code of rewards: mine.py": "c"}
    (place.checkpoint(2) / "manifest.json").unlink()
    folder = place.folder / "run" / "checkpoints" / "step_000002"
    Manifest("id", 2, 1, 0, settings_of(place.config()), {}, inputs).write(folder)
    place.numbers(range(3))
    assert (
        place.start(inputs=inputs).step == place.start(inputs={}).step == place.start(inputs={"other": "d"}).step == 2
    )
    assert place.said == []
    assert place.start(inputs={**inputs, "code of rewards: mine.py": "d"}).step == 2
    assert place.said == ["changed since the checkpoint: code of rewards: mine.py"]
    changed = {**inputs, "training rows": "d", "policy.model weights": "e"}
    says = place.refusal(inputs=changed)
    assert "inputs have changed since the checkpoint of step 2: training rows, policy.model weights: put them" in says
    assert place.start(inputs=changed, **{"run.allow_changes": True}).step == 2
    assert place.said[1:] == ["changed since the checkpoint: training rows, policy.model weights"]


# Runs -----------------------------------------------------------------------------------------------------------------


def results(folder):
    """All that a run leaves, times and memory aside; the checkpoints by the numbers in their files."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "throughput/", "memory/")
    numbers = [{name: value for name, value in row.items() if not name.startswith(timed)} for row in rows]
    files = [path for name in ("model", "rollouts") for path in sorted((folder / name).iterdir())]
    return numbers, {str(p.relative_to(folder)): p.read_bytes() for p in [*files, folder / "prompts.jsonl"]}


def assert_same(folder, other):
    (numbers, files), (others, their_files) = results(folder), results(other)
    assert numbers == others
    assert files.keys() == their_files.keys()
    assert [name for name in files if files[name] != their_files[name]] == []


@pytest.mark.ranks
def test_an_interrupted_run_ends_as_the_uninterrupted_one_to_the_bit(whole_run):
    """A full disk stops it at the checkpoint of step 4, whose numbers are written; it resumes from that of step 2."""
    folder = whole_run.workshop.folder / "runs" / "broken"
    arguments = [*whole_run.arguments, "--run.name=broken", "--checkpoint.on_failure=stop"]
    faults = json.dumps({4: "policy_00001_of_00002.pt"})
    done = forks.run(SUPPORT / "full_disk.py", faults, *arguments, world=2, cwd=whole_run.workshop.folder)
    assert done.status == 2 and "Traceback" not in done.err
    lines = [line for line in done.err.splitlines() if "error:" in line]
    says = (
        "checkpoint runs/broken/checkpoints/step_000004 could not be written: No space left on device (rank 1);"
        " the newest one is from step 2: make room or fix the cause, and continue with --run.resume auto"
    )
    assert lines == [f"hybrid-grpo: error: {says}"]
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["run_id", "step_000000", "step_000002"]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 5

    # And then the machine went away while it saved and exported.
    (folder / "checkpoints" / ".draft_step_000004").mkdir()
    shutil.copytree(whole_run.folder / "model", folder / ".model_draft")
    (folder / "rollouts" / "step_000009.jsonl").write_text("")
    copy = folder / "rollouts" / "step_copy.jsonl"
    copy.write_bytes(b"\xff")
    done = whole_run.workshop.run(*arguments, "--run.resume=auto", ranks=2)
    assert done.status == 0, done.err
    assert "resumed runs/broken after step 2" in done.out
    copy.unlink()
    assert_same(folder, whole_run.folder)
    assert [line["step"] for line in read_jsonl(folder / "details.jsonl")] == [1, 2, 3, 4, 5, 6]
    names, whole = ({path.name for path in place.iterdir()} for place in (folder, whole_run.folder))
    assert names == whole - {"profile"}, "the other run was traced, and has the same numbers"


@pytest.mark.ranks
def test_a_disk_that_is_full_at_any_point_of_a_save_costs_that_save_alone(whole_run):
    """The run goes on, as `checkpoint.on_failure` says by default, and learns what it would have learned."""
    names = [f"{kind}_{rank:05d}_of_00002.pt" for kind in ("policy", "state", "reference") for rank in (0, 1)]
    names.append(".manifest.json.draft")
    faults = {**dict(enumerate(names, 1)), 8: 100, 9: 20_000, 10: 1_000_000}
    arguments = [*whole_run.arguments, "--run.name=full", "--checkpoint.every=1", "--run.steps=11"]
    done = forks.run(SUPPORT / "full_disk.py", json.dumps(faults), *arguments, world=2, cwd=whole_run.workshop.folder)
    assert done.status == 0, done.err
    folder = whole_run.workshop.folder / "runs" / "full"
    warnings = [line for line in done.out.splitlines() if line.startswith("WARNING: checkpoint")]
    ends = "; the newest one is from step 0, and the run continues (checkpoint.on_failure say)"
    reasons = [*["No space left on device"] * 7, *["File too large"] * 3]
    ranks = [0, 1, 0, 1, 0, 1, 0, 1, 1, 1]
    assert warnings == [
        f"WARNING: checkpoint runs/full/checkpoints/step_{step:06d} could not be written: {reason} (rank {rank}){ends}"
        for step, (reason, rank) in enumerate(zip(reasons, ranks, strict=True), 1)
    ]
    # That of step 0 was whole all the time; the last one fits.
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["run_id", "step_000000", "step_000011"]
    assert results(folder)[0][:7] == results(whole_run.folder)[0]


@pytest.mark.ranks
def test_an_export_that_fails_keeps_the_weights_and_a_finished_run_is_not_repeated(whole_run):
    workshop, folder = whole_run.workshop, whole_run.workshop.folder / "runs" / "export"
    arguments = [*whole_run.arguments, "--run.name=export", "--run.steps=2", "--engine.zero_stage=0"]
    # One file is written by Python, the other by a library in Rust.
    for file, more in (("config.json", []), ("tokenizer.json", ["--run.resume=auto"])):
        faults = json.dumps({"model": file})
        done = forks.run(SUPPORT / "full_disk.py", faults, *arguments, *more, cwd=workshop.folder)
        assert done.status == 2 and "Traceback" not in done.err
        (line,) = [line for line in done.err.splitlines() if "error:" in line]
        assert line.startswith("hybrid-grpo: error: runs/export/model could not be written: ")
        assert "No space left on device" in line and "the newest checkpoint, of step 2, has the weights" in line
        assert not list(folder.glob("*model*"))
    metrics = (folder / "metrics.jsonl").read_bytes()
    for says in ("resumed runs/export after step 2", "runs/export is finished after 2 steps: raise run.steps"):
        done = workshop.run(*arguments, "--run.resume=auto")
        assert done.status == 0, done.err
        assert says in done.out
        assert (folder / "metrics.jsonl").read_bytes() == metrics
    for name in ("model/model.safetensors", "model/tokenizer.json", "model/config.json", "report.html"):
        assert (folder / name).stat().st_size > 0
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [".lock"]


@pytest.mark.ranks
def test_a_full_disk_while_rollouts_are_written_stops_the_run_in_one_line(whole_run):
    workshop, folder = whole_run.workshop, whole_run.workshop.folder / "runs" / "rollouts"
    arguments = [*whole_run.arguments, "--run.name=rollouts", "--engine.zero_stage=0", "--run.steps=3"]
    draft = folder / "rollouts" / ".step_000003.jsonl.draft"
    draft.parent.mkdir(parents=True)
    draft.symlink_to("/dev/full")
    done = workshop.run(*arguments)
    assert done.status == 2 and "Traceback" not in done.err
    (line,) = [line for line in done.err.splitlines() if "error:" in line]
    assert line == (
        "hybrid-grpo: error: runs/rollouts cannot be written: No space left on device: make room or fix the cause, then"
        " continue with --run.resume auto"
    )
    draft.unlink()
    done = workshop.run(*arguments, "--run.resume=auto")
    assert done.status == 0, done.err
    assert "resumed runs/rollouts after step 2" in done.out
    assert [len(path.read_text().splitlines()) for path in sorted(draft.parent.glob("*.jsonl"))] == [16, 16, 16]
