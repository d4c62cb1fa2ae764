import math

import pytest
from run_folder import rows, write_lines

from hybrid_grpo.records.alarm_records import AlarmRecord, write_alarm
from hybrid_grpo.records.files import cut_lines
from hybrid_grpo.records.trackers.steps import TrackedSteps, chosen, table


def test_an_entry_has_the_numbers_the_axes_and_what_was_said_and_written(folder):
    first, second = TrackedSteps(folder, -1, histograms_every=2).new()
    assert math.isnan(first.values.pop("policy/loss"))
    assert first.values == {
        **{"reward/mean": 0.5, "time/step_s": 1800.0, "completion/sampled_tokens": 18.0},
        **{"progress/step": 1, "progress/tokens": 18.0, "progress/hours": 0.5},
    }
    assert (second.values["progress/tokens"], second.values["progress/hours"]) == (36.0, 1.0)
    assert (first.alarms, second.alarms) == ([], ["the gap is wide"])
    assert first.distributions["distribution/reward"] == [0, 0, 0, 0, 1, 2, 0, 2, 4] and not second.distributions
    assert first.distributions.keys() == {f"distribution/{name}" for name in ("reward", "length", "advantage")}


def test_steps_come_once_as_they_are_written_and_not_before_they_are_whole(folder):
    entries = TrackedSteps(folder, -1, histograms_every=0)
    assert [entry.step for entry in entries.new()] == [1, 2]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/')
        file.flush()
        assert list(entries.new()) == []
        file.write('mean": 1}\n')
    write_lines(folder / "rollouts" / "step_000004.jsonl", rows(4))
    assert [(entry.step, entry.values["reward/mean"]) for entry in entries.new()] == [(3, 1)]
    assert [(entry.step, entry.values) for entry in entries.unfinished()] == [(4, {"progress/step": 4})]


def test_a_resumed_run_counts_tokens_and_hours_from_its_beginning_but_shows_only_new_steps(folder):
    write_alarm(folder, AlarmRecord(2, "parity", 1, "", until=1))
    write_alarm(folder, AlarmRecord(3, "parity", 3, "once more"))
    (entry,) = TrackedSteps(folder, 1, histograms_every=1).new()
    assert (entry.step, entry.values["progress/tokens"], entry.values["progress/hours"]) == (2, 36.0, 1.0)
    cut_lines(folder / "alarms.jsonl", 2)
    (entry,) = TrackedSteps(folder, 1, histograms_every=1).new()
    assert entry.alarms == ["the gap is wide"]
    cut_lines(folder / "alarms.jsonl", 1)
    assert (folder / "alarms.jsonl").read_text() == ""


def test_pictures_of_samples_are_shown_once_where_histograms_are(seeing):
    first, second = TrackedSteps(seeing, -1, histograms_every=2).new()
    assert [path.name for path, _ in first.pictures] == ["1.png", "2.png"] and not second.pictures
    assert first.pictures[0][1].startswith("best, reward ")
    (unasked, _) = TrackedSteps(seeing, -1, histograms_every=0).new()
    assert not unasked.pictures


def test_samples_are_the_best_the_worst_the_surprising_and_after_an_alarm_all():
    lines = rows(7)
    lines[0]["reward"] = None  # a reward function failed on it
    lines[4]["advantage"] = -9.0
    told = [(why, row["completion"]) for why, row in chosen(lines, alarm=False)]
    kinds = {"best": ["22", "12", "02"], "worst": ["01", "10", "20"], "surprising": ["11"]}
    assert told == [(why, text) for why, texts in kinds.items() for text in texts]
    with_alarm = [(why, row["completion"]) for why, row in chosen(lines, alarm=True)]
    assert with_alarm == [*told, ("alarm", "00"), ("alarm", "21")]
    many = [{**rows(1)[number % 3], "group": number // 3} for number in range(300)]
    many[151]["advantage"] = 99.0
    kept = chosen(many, alarm=False)
    assert [why for why, _ in kept].count("best") == 4 and len(kept) <= 12 and ("surprising", many[151]) in kept


@pytest.mark.parametrize("prompt", ["sort: ba", [{"role": "user", "content": "sort: ba"}]])
def test_a_table_has_a_column_for_every_reward_and_text_for_messages(prompt):
    lines = [{**row, "prompt": prompt} for row in rows(7)]
    columns, cells = table(chosen(lines, alarm=False))
    assert columns[0] == "why" and columns[-1] == "reward/exact" and cells[0][-1] == 4.0
    assert all(isinstance(row[columns.index("prompt")], str) for row in cells)
