"""When alarms go off, and when they are said."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from paths import ROOT

from hybrid_grpo.config import AlarmConfig, AlarmsConfig, RunConfig, TrainConfig, build, to_dict
from hybrid_grpo.config import alarms as alarm_settings
from hybrid_grpo.config.errors import RunStopped, UserError
from hybrid_grpo.config.parsing import Parsed
from hybrid_grpo.records.alarms.alarms import Alarms, RollBack
from hybrid_grpo.records.alarms.symptoms import Symptoms
from hybrid_grpo.run.saving.checkpoints import Checkpoint
from hybrid_grpo.run.saving.manifest import Manifest
from hybrid_grpo.run.stage import Stage
from hybrid_grpo.run.start import Start
from hybrid_grpo.run.training import TrainingRun


def played(steps: list[dict[str, float]]) -> list[str | None]:
    watching = Alarms()
    said = [next(iter(watching.watch(step, values)), None) for step, values in enumerate(steps)]
    return [None if alarm is None else alarm.message for alarm in said]


def line(reward: float | None, accuracy: float | None = None) -> dict[str, float]:
    return {
        **({} if reward is None else {"reward/mean": reward}),
        **({} if accuracy is None else {"eval/heldout/accuracy": accuracy, "eval/heldout/reward_mean": 0.25}),
    }


def test_a_training_reward_that_rises_while_accuracy_falls_is_an_alarm():
    steps = [line(None, 0.5), line(0.2), line(0.4, 0.6), line(0.5), line(0.6, 0.57), line(0.7), line(0.8, 0.5)]
    said = played(steps)
    assert said[:-1] == [None] * 6, "0.57 is within the limit of 0.6"
    assert said[-1].startswith(
        "held_out: held-out accuracy is 0.500 after 0.600 at step 2, while the training reward rose from 0.300 to"
        " 0.750: "
    )
    watching = Alarms()
    assert [alarm.since for step, values in enumerate(steps) for alarm in watching.watch(step, values)] == [3]
    assert [s["health/alarm"] for s in steps if "health/alarm" in s] == [0.0, 0.0, 0.0, 1.0]
    assert steps[4]["health/heldout_gap"] == pytest.approx(0.35) and "health/heldout_gap" not in steps[0]


def test_every_set_is_compared_with_its_own_best():
    """One set is evaluated at steps 0, 2 and 4, the other at 0 and 4 only, by another level."""
    often = [0.5, None, 0.6, None, 0.5]
    steps = [line(None if step == 0 else 0.2 * step, accuracy) for step, accuracy in enumerate(often)]
    for step in (0, 4):
        steps[step] |= {"eval/rare/accuracy": 0.9, "eval/rare/reward_mean": 0.75}
    said = played(steps)
    assert said[:-1] == [None] * 4 and said[-1].startswith(
        "held_out: held-out accuracy of heldout is 0.500 after 0.600 at step 2"
    )
    assert [s.get("health/heldout_gap") for s in steps[2::2]] == pytest.approx([0.15, 0.55])
    steps[4]["eval/heldout/accuracy"], steps[4]["eval/rare/accuracy"] = 0.6, 0.8
    assert played(steps)[-1].startswith("held_out: held-out accuracy of rare is 0.800 after 0.900 at step 0")


@pytest.mark.parametrize(
    "steps",
    [
        [line(None, 0.5), line(0.5), line(0.4, 0.3), line(0.3, 0.2)],
        [line(None, 0.5), line(0.2), line(0.4, 0.47), line(0.6, 0.46)],
        [line(0.2), line(0.4)],
    ],
    ids=["both fall", "a little", "no evaluation"],
)
def test_no_alarm_without_both(steps):
    assert played(steps) == [None] * len(steps)


def test_the_reward_of_the_best_evaluation_is_that_of_the_steps_since_the_one_before():
    """Rewards 0.2 and 0.4, then 0.6 and 0.8 up to the best evaluation, whose reward is 0.7 rather than 0.5."""
    before = [line(None, 0.5), line(0.2), line(0.4, 0.6), line(0.6), line(0.8, 0.7)]
    for reward, raised in ((0.65, False), (0.75, True)):
        steps = [dict(step) for step in before] + [line(reward), line(reward, 0.5)]
        assert (played(steps)[-1] is not None) == raised


def test_an_accuracy_that_is_as_good_again_is_the_one_to_compare_with():
    steps = [line(None, 0.5), line(0.2), line(0.4, 0.6), line(0.5), line(0.6, 0.6), line(0.7), line(0.8, 0.5)]
    said = played(steps)[-1]
    assert said and "0.500 after 0.600 at step 4, while the training reward rose from 0.550 to 0.750" in said


HEALTHY = {
    **{"reward/mean": 0.5, "reward/max": 1.0, "reward/min": 0.0, "reward/right/mean": 0.5, "reward/style/mean": 0.2},
    **{"reward/right/failed_frac": 0.0, "reward/style/failed_frac": 0.01, "policy/entropy": 0.8, "policy/kl": 0.1},
    **{"policy/ratio_max": 1.5, "parity/logp_abs_diff_mean": 0.01, "completion/length_mean": 20.0},
    **{"completion/clipped_frac": 0.1, "completion/duplicate_frac": 0.2, "group/zero_std_frac": 0.4},
    **{"group/all_right_frac": 0.3, "throughput/generated_tokens_per_s": 1000.0},
}
EQUAL = {"reward/max": 0.5, "reward/min": 0.5, "group/zero_std_frac": 1.0}
SOLVED = {"reward/mean": 1.0, "reward/max": 1.0, "reward/min": 1.0, "group/all_right_frac": 1.0}
COLLAPSED = {"policy/entropy": 0.001, "completion/duplicate_frac": 0.87, "group/all_right_frac": 0.0}


def alarms(section: dict[str, object] | None = None, **symptoms: bool) -> Alarms:
    return Alarms(build(TrainConfig, {"alarms": section or {}}).alarms, Symptoms("right", **symptoms))


def rise(start: float, end: float, step: int, steps: int = 10) -> float:
    """From one value to another within so many steps from step 31 on."""
    return start + (end - start) * min(max(step - 30, 0) / steps, 1.0)


@pytest.mark.parametrize("changed, raised", [
    ({}, {}),
    (COLLAPSED, {"entropy_collapse": 40}),
    ({**COLLAPSED, **EQUAL}, {"entropy_collapse": 40}),
    ({"policy/entropy": 0.001, **SOLVED, "group/zero_std_frac": 1.0, "completion/duplicate_frac": 0.87}, {}),
    ({"completion/length_mean": 70.0, "completion/clipped_frac": 0.9}, {"length_runaway": 35}),
    ({"completion/length_mean": lambda k: 20.0 * 1.01**k, "completion/clipped_frac": 0.39}, {}),
    ({"completion/clipped_frac": 0.5, "group/zero_std_frac": 1.0, "group/all_right_frac": 0.0}, {"truncated": 35}),
    ({"group/zero_std_frac": 0.95, "group/all_right_frac": 0.1}, {"dead_groups": 40}),
    ({"group/zero_std_frac": 0.95, "group/all_right_frac": 0.6}, {}),
    ({**EQUAL, "group/all_right_frac": 0.0}, {"constant_reward": 40}),
    ({**SOLVED, "group/zero_std_frac": 1.0}, {}),
    ({"reward/right/mean": lambda k: rise(0.5, 0.3, k), "reward/mean": lambda k: rise(0.5, 0.9, k)},
     {"reward_hacking": 42}),
    ({"reward/right/mean": lambda k: rise(0.5, 0.3, k), "reward/mean": lambda k: rise(0.5, 0.3, k)}, {}),
    ({"reward/right/mean": lambda k: (0.2, 0.8)[k % 2] - rise(0, 0.15, k), "reward/mean": lambda k: k / 60}, {}),
    ({"policy/kl": 3.0}, {"kl": 35}),
    ({"policy/kl": lambda k: 3.0 * (k > 30 and k % 5 != 0)}, {}),
    ({"policy/ratio_max": 21.0}, {"ratio": 33}),
    ({"parity/logp_abs_diff_mean": 0.06, "policy/ratio_max": 5000.0}, {"parity": 31}),
    ({"completion/duplicate_frac": 0.8, "group/zero_std_frac": 0.95, "group/all_right_frac": 0.0}, {"duplicates": 35}),
    ({"completion/duplicate_frac": 0.8, "completion/length_mean": 6.0}, {}),
    ({"policy/frozen_tensors": 2.0}, {"frozen_tensors": 31}),
    ({"throughput/generated_tokens_per_s": 150.0}, {"throughput_drop": 40}),
    ({"throughput/generated_tokens_per_s": 150.0, "time/profiled": 1.0}, {}),
    ({"throughput/generated_tokens_per_s": lambda k: 1000.0 if k % 8 else 50.0}, {}),
    ({"reward/style/failed_frac": 0.2, **EQUAL}, {"failing_rewards": 33}),
    ({"eval/heldout/accuracy": 0.4, "reward/mean": lambda k: k / 60}, {"held_out": 31}),
    ({"eval/heldout/accuracy": 0.4, "eval/heldout/stderr": 0.04, "reward/mean": lambda k: k / 60},
     {"held_out_flat": 32}),
])  # fmt: skip
def test_a_symptom_that_begins_at_step_31_raises_its_alarm_and_no_other(changed, raised):
    """What changes from then on; a function of the step holds from the first step on."""
    watching, said = alarms(), []
    for step in range(1, 61):
        values = dict(HEALTHY)
        if step == 20 and "eval/heldout/accuracy" in changed:
            values["eval/heldout/accuracy"] = 0.5
        for name, value in changed.items():
            if step > 30 or (callable(value) and not name.startswith("eval/")):
                values[name] = value(step) if callable(value) else value
        said += watching.watch(step, values)
    assert {alarm.alarm: alarm.step for alarm in said} == raised
    assert all(alarm.message.startswith(f"{alarm.alarm}: ") for alarm in said)
    assert all(alarm.since == 31 for alarm in said if alarm.alarm not in ("reward_hacking", "held_out"))


def test_groups_and_rewards_say_nothing_where_the_policy_does_not_need_them():
    teacher = alarms(rewarded=False)
    rows = [(step, {**HEALTHY, **EQUAL, "group/all_right_frac": 0.0}) for step in range(1, 20)]
    assert not [alarm for row in rows for alarm in teacher.watch(*row)]


def test_an_alarm_is_said_once_for_every_time_that_it_begins_and_null_takes_it_out():
    section = {"kl": {"above": 1, "patience": 2}, "ratio": None, "numbers": {"completion/length_max": {"below": 2}}}
    watching, kl = alarms(section), [2, 2, 2, 0, 2, 2, 0.5, 2]
    rows = [{"policy/kl": value, "policy/ratio_max": 1e9, "completion/length_max": 1.0} for value in kl]
    said, over = [], []
    for k, row in enumerate(rows):
        said += [(alarm.step, alarm.since, alarm.alarm) for alarm in watching.watch(k, row)]
        over += [(alarm.alarm, alarm.since, alarm.until, alarm.message) for alarm in watching.over]
    assert said == [(1, 0, "kl"), (2, 0, "completion/length_max"), (5, 4, "kl")]
    assert over == [("kl", 0, 2, ""), ("kl", 4, 5, "")], "problems end, and the page shows until when"
    config = build(TrainConfig, {"alarms": section})
    assert config.alarms.kl == AlarmConfig(above=1.0, patience=2) and build(TrainConfig, to_dict(config)) == config


def test_every_alarm_has_its_line_in_the_docs():
    page = (ROOT / "docs/when-something-looks-wrong.md").read_text()
    for name in AlarmsConfig().named:
        assert f"\n| `{name}` | " in page, name


def test_what_an_alarm_does():
    """Stop is stronger than going back; that is behind the first bad step; a resumed run has patience anew."""
    going = alarms({"kl": {"patience": 2, "action": "roll_back"}, "ratio": {"patience": 3, "action": "stop"}})
    bad = {"policy/kl": 9.0, "policy/ratio_max": 900.0}
    going.watch(1, {"policy/kl": 0.0})
    assert not going.doubts
    going.watch(2, bad)
    going.act("")
    assert going.doubts, "checkpoints of bad steps are not to push out the good one"
    going.watch(3, bad)
    with pytest.raises(RollBack) as back:
        going.act("")
    assert back.value.since == 2 and str(back.value).startswith("alarm kl: ") and not going.stops
    going.watch(4, bad)
    assert going.stops
    with pytest.raises(RunStopped, match=r"alarm ratio: .* \(900, above 20 for 3 steps; alarms.ratio\): the run is"):
        going.act("there is a checkpoint")
    resumed = alarms({"ratio": {"patience": 2, "action": "stop"}})
    for step in (1, 2):
        resumed.remember(step, dict(bad))
    resumed.watch(3, bad)
    resumed.act("")
    stopping = alarms({"kl": {"patience": 2, "action": "roll_back"}, "ratio": {"patience": 3, "action": "stop"}})
    stopping.watch(1, {"policy/kl": 0.0, "policy/ratio_max": 900.0})
    assert not stopping.doubts, "nothing goes back because of a ratio"


def test_what_is_bad_before_the_update_is_not_learned_from():
    skipping = alarms({"dead_groups": {"patience": 2, "action": "skip"}})
    assert skipping.may_skip and not alarms().may_skip
    dead = {**HEALTHY, "group/zero_std_frac": 1.0, "group/all_right_frac": 0.0}
    steps = [dead, dead, dead, HEALTHY, dead]
    skipped = []
    for step, values in enumerate(steps):
        skipped.append(skipping.skips(dict(values)))
        skipping.watch(step, dict(values))
    assert skipped == [False, True, True, False, False]


def test_patience_goes_on_where_it_was_and_begins_anew_after_a_stop():
    """A run that was killed after two of three bad steps had patience with three more."""
    settings = {"kl": {"above": 1.0, "patience": 3, "action": "stop"}}
    bad, whole = {**HEALTHY, "policy/kl": 2.0}, alarms(settings)
    for step in range(3):
        whole.watch(step, dict(bad))
        resumed = alarms(settings)
        resumed.remember(step, dict(bad))
        resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        said = resumed.watch(step + 1, dict(bad))
        assert [alarm.since for alarm in said] == ([0] if step == 1 else []) and resumed.stops is (step == 1)
    assert whole.stops
    # A limit that was taken out in between is forgotten.
    alarms({"kl": None}).load_state_dict({"bad": {"kl": 2}, "since": {"kl": 0}})


def test_a_resumed_run_knows_its_best_evaluation(tmp_path, capsys):
    run = TrainingRun(Parsed(TrainConfig(run=RunConfig(name="run", dir=str(tmp_path))), ""), {}, None)
    lines = [
        {"step": step, **numbers, "policy/loss": None} for step, numbers in enumerate([line(None, 0.5), line(0.2)])
    ]
    manifest = Manifest("0" * 16, 1, 1, 0, {}, {})
    run.start = Start(Checkpoint(tmp_path, manifest), tuple(json.dumps(of) + "\n" for of in lines))
    run.checkpoints = SimpleNamespace(load=lambda engine, checkpoint: {"policy": {}, "step": 1})
    policy = SimpleNamespace(engine=None, load_state_dict=lambda state: None)
    stage = Stage(policy, SimpleNamespace(reduce=lambda: line(0.6, 0.4)))
    assert run.restore(stage) == 1
    assert run.watched(2, stage)["health/alarm"] == 1.0
    assert "held-out accuracy is 0.400 after 0.500 at step 0" in capsys.readouterr().out


def test_only_what_is_looked_at_is_remembered(tmp_path):
    row = {"step": 1, "policy/kl": None, "policy/lr": 1e-5, "reward/mean": 0.5}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({**row, "step": step}) + "\n" for step in (1, 2)))
    going, seen = alarms(), []
    going.remember = lambda step, values: seen.append((step, values))
    going.recall(tmp_path, 1)
    assert seen == [(1, {"reward/mean": 0.5})]


def test_a_number_of_ones_own_that_is_no_metric_is_refused():
    with pytest.raises(UserError, match=r"alarms\.numbers policy/kul is not a metric: did you mean policy/kl\?"):
        Alarms(AlarmsConfig(numbers={"policy/kul": AlarmConfig(above=1.0)}))


def test_what_an_alarm_is_not_given_is_its_default_which_is_made_once(monkeypatch):
    checked = []
    monkeypatch.setattr(alarm_settings, "refuse", lambda *refused: checked.append(refused))
    default = AlarmsConfig()
    once = len(checked)
    config = AlarmsConfig(**{name: {"patience": 77} for name in default.named})
    assert config.named == {name: replace(alarm, patience=77) for name, alarm in default.named.items()}
    assert len(checked) == 2 * once


def test_a_reward_that_rises_where_held_out_accuracy_does_not_is_a_warning_before_a_fall_is_proven():
    """Of 128 prompts 10 were right and then 5, with a reward that rose from 0.2 to 0.9: no alarm had been on."""

    def said(accuracy, reward, **config):
        watching, found = Alarms(AlarmsConfig(**config)), []
        for step in range(81):
            values = {"reward/mean": reward(step) + 0.01 * (-1) ** step}
            if step % 20 == 0:
                values |= {
                    "eval/few/accuracy": accuracy[step // 20],
                    "eval/few/reward_mean": 0.1,
                    "eval/few/stderr": 0.024,
                }
            found += [(alarm.step, alarm.alarm, alarm.message) for alarm in watching.watch(step, values)]
        return found

    rises = lambda step: 0.2 + 0.7 * step / 80  # noqa: E731
    falls = [0.078, 0.07, 0.055, 0.047, 0.039]
    ((step, name, message),) = said(falls, rises)
    assert (step, name) == (40, "held_out_flat")
    assert "held-out accuracy is 0.055 after 0.078 at step 0, while the training reward rose from 0.239 to" in message
    assert "for 2 evaluations; alarms.held_out)" in message
    assert not said(falls, lambda step: 0.2), "the reward does not rise"
    assert not said([0.078, 0.08, 0.07, 0.1, 0.12], rises), "accuracy rises, with one evaluation below the first"
    assert not said(falls, rises, held_out=None)


def test_the_alarm_that_is_closest_to_its_limit_is_named_with_its_way():
    """Entropy went from 1.8 to 0.06 and nobody was told: the limit is 0.02."""
    watching, ways = Alarms(), []
    for step in range(20):
        values = {"policy/entropy": max(0.06, 1.8 - 0.2 * max(0, step - 4)), "policy/kl": 0.01 * step}
        values |= {"throughput/generated_tokens_per_s": 100.0 / (step + 1)}
        watching.watch(step, values)
        ways.append({name: way for name, way in values.items() if name.startswith("health/closest/")})
    assert ways[:5] == [{}] * 5
    assert ways[-1] == {"health/closest/entropy_collapse": pytest.approx((1.8 - 0.06) / (1.8 - 0.02))}
    assert all(len(way) == 1 for way in ways[5:])
