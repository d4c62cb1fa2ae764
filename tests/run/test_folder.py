"""What is damaged in a run's folder, and is not a checkpoint, ends no run."""

import json
from dataclasses import replace
from types import SimpleNamespace

from rank_threads import in_ranks

from hybrid_grpo.config import LogConfig, RunConfig, SftConfig, TrainConfig
from hybrid_grpo.config.parsing import Parsed
from hybrid_grpo.records.json_lines import read_jsonl
from hybrid_grpo.records.sinks import Log
from hybrid_grpo.run.folder import named
from hybrid_grpo.run.saving.manifest import Manifest
from hybrid_grpo.run.settings import settings_of
from hybrid_grpo.run.stage import Stage
from hybrid_grpo.run.training import TrainingRun


def begun(config):
    """A run whose policy has been restored."""
    run = TrainingRun(Parsed(config, ""), {}, None)
    run.checkpoints.load = lambda *_: {"policy": {}}
    run.restore(Stage(SimpleNamespace(engine=None, load_state_dict=lambda _: None), None))
    return run


def test_ranks_agree_on_the_time_that_names_a_run_and_resuming_without_a_name_finds_the_newest_of_the_command(
    tmp_path, capsys
):
    configs = [cls(run=RunConfig(dir=str(tmp_path))) for cls in (TrainConfig, TrainConfig, SftConfig)]
    (tmp_path / "train-1").mkdir()
    made = []
    for config in configs:
        (name,) = {of.run.name for of in in_ranks(2, lambda rank, config=config: named(config))}
        (tmp_path / name).mkdir()
        made.append(name)
    assert len({*made}) == 3 and [name.partition("-")[0] for name in made] == ["train", "train", "sft"]

    def resumed(model="", step=0, newest=0):
        """The name of the run that train resumes after a run got a model of `step` and a checkpoint `newest`."""
        if model:
            (tmp_path / model / f"checkpoints/step_{newest:06}").mkdir(parents=True)
            (tmp_path / model / "model").mkdir(exist_ok=True)
            (tmp_path / model / "model/run.json").write_text(json.dumps({"step": step}))
        return named(replace(configs[0], run=replace(configs[0].run, resume="auto"))).run.name

    # A finished run ended every later command that was to resume one; with a newer checkpoint it is not finished.
    assert [resumed(), resumed(made[1], 7, 7), resumed(made[0], 7, 9)] == [made[1], made[0], made[0]]
    assert resumed(made[0], 10, 10) not in made
    said = capsys.readouterr().out
    assert said.count("is the newest unfinished run of train without a name") == 3
    assert f"a new run, as {tmp_path / made[1]} is finished: --run.name {made[1]} continues it" in said
    assert named(replace(configs[2], run=replace(configs[2].run, resume="auto"))).run.name == made[2]


def test_whatever_is_damaged_is_set_aside_and_named(tmp_path, capsys):
    """Garbage in alarms.jsonl ended runs with tracebacks."""
    config = TrainConfig(run=RunConfig("run", str(tmp_path), steps=9, resume="auto"))
    folder = tmp_path / "run"
    checkpoint = folder / "checkpoints" / "step_000002"
    checkpoint.mkdir(parents=True)
    Manifest("0" * 16, 2, 1, 0, settings_of(config), {}).write(checkpoint)
    (folder / "checkpoints" / "run_id").write_text("0" * 16)
    lines = [{"step": step} for step in (1, 1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    alarm = {"step": 1, "alarm": "kl", "since": 1, "message": "m", "action": "say"}
    (folder / "alarms.jsonl").write_bytes(json.dumps(alarm).encode() + b'\n\xff\xfe\n{"ste')
    (folder / "details.jsonl").write_bytes(b'{"step":1}\n\x00\n{"step":2}\n')
    run = begun(config)
    Log(LogConfig(wandb="disabled"), folder, 9, run.start.step).close()
    said = [line.replace(f"{folder}/", "") for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert said == [
        "WARNING: metrics.jsonl: some of its lines are damaged; the run continues without them",
        "WARNING: metrics.jsonl: it is damaged; it is kept as damaged_1.metrics.jsonl",
        "WARNING: alarms.jsonl: a line cannot be read; the original is kept as damaged_1.alarms.jsonl",
        "WARNING: details.jsonl: a line cannot be read; the original is kept as damaged_1.details.jsonl",
    ]
    assert read_jsonl(folder / "metrics.jsonl") == [{"step": 1}, {"step": 2}]
    assert read_jsonl(folder / "alarms.jsonl") == [alarm]
    assert (folder / "details.jsonl").read_bytes() == b'{"step":1}\n'
    assert b"\x00" in (folder / "damaged_1.details.jsonl").read_bytes()
    # Nothing is damaged any more.
    run._run_folder.release()
    begun(config)
    assert "WARNING" not in capsys.readouterr().out
