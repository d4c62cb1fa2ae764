"""Settings of runs beside each other: those that differ, those that are not the default, the telling ones first."""

from hybrid_grpo.config import TrainConfig
from hybrid_grpo.config.building import to_dict
from hybrid_grpo.watch.settings import compared


def names(entries, kind):
    return [entry["name"] for entry in entries if entry[kind]]


def test_settings_that_differ_come_in_the_order_in_which_people_ask_for_them():
    runs = {run: to_dict(TrainConfig()) for run in ("a", "b")}
    for at, run in enumerate(runs.values()):
        run["run"] |= {"name": f"run {at}", "seed": at}
        run["log"]["tags"] = [str(at)]
        run["grpo"]["num_iterations"] = 1 + at
        run["policy"] |= {"lr": 10.0**-at, "betas": [0.9, 0.9 - 0.1 * at]}
        run["own"] = {"thing": at}
    runs["b"]["sft"] = {"batch_size": 3}
    entries = compared(runs)
    assert names(entries, "differ") == [
        *("policy.lr", "grpo.num_iterations", "policy.betas", "run.seed", "own.thing", "log.tags", "sft.batch_size")
    ], "run.name is not compared, and what only one run has comes last"
    rate = next(entry for entry in entries if entry["name"] == "policy.lr")
    assert (rate["values"], rate["default"]) == ({"a": "1.0", "b": "0.1"}, "1e-06")
    assert entries[0]["name"] == "policy.model" and not entries[0]["differ"]


def test_what_a_run_has_changed_is_told_by_the_defaults_of_its_command():
    changed = names(compared({"a": {"sft": {"batch_size": 3}, "policy": {"lr": 1e-6, "dtype": "float32"}}}), "changed")
    assert changed == ["sft.batch_size", "policy.dtype"]
    assert names(compared({"a": to_dict(TrainConfig())}), "changed") == []
