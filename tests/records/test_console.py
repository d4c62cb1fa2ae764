import io
import math
import re
import sys

from rich.table import Table

from hybrid_grpo.records.console import ConsoleSink, NotebookSink, make_console


class Terminal(io.StringIO):
    def isatty(self):
        return True


EVERYTHING = {
    **{"reward/mean": -12.3456, "completion/length_mean": 1234.5, "policy/kl": 0.01234, "policy/entropy": 2.34567},
    **{"policy/grad_norm": 123.456, "completion/sampled_tokens": 3000.0, "time/step_s": 1.5},
    "throughput/generated_tokens_per_s": 6114.0,
}


def written(steps, *lines):
    stream = io.StringIO()
    sink = ConsoleSink(steps, stream=stream)
    for step, values in lines:
        sink.write(step, values)
    sink.close()
    return stream.getvalue().splitlines()


def test_a_line_shows_the_held_out_accuracy_only_where_it_was_measured():
    first, second, third = written(
        2,
        (0, {"eval/heldout/accuracy": 0.25, "eval/other/accuracy": 0.5}),
        (1, {"reward/mean": 0.5, "completion/length_mean": 12.34, "time/step_s": math.nan}),
        (2, {"eval/other/accuracy": 0.5, "eval/heldout/accuracy": 0.75}),
    )
    assert first == "step 0/2  held out 0.250" and third == "step 2/2  held out 0.750"
    assert second.startswith("step 1/2  reward 0.500  length 12.3  nan s/step  left 0:00:0")


def test_a_training_accuracy_is_not_shown_as_held_out():
    """Once it was, in every line: a source and a language of the training prompts have an accuracy too, and a resumed
    run meets theirs before its first evaluation. Nor are their steps printed like evaluations."""
    trained = {"reward/mean": 0.5, "source/ok/accuracy": 0.125, "language/en/accuracy": 0.125}
    first, second = written(400, (7, trained), (8, trained), (9, {**trained, "eval/heldout/accuracy": 0.75}))
    assert "held out" not in first and "reward 0.500  held out 0.750" in second
    shown = []
    sink = NotebookSink(2, show=shown.append)
    for step in range(3):
        sink.write(step, trained)
    assert "reward 0.5 " in shown[-1] and "held out" not in shown[-1]


def test_lines_fit_into_80_columns_and_name_every_number():
    lines = written(100_000, (500, {**EVERYTHING, "eval/heldout/accuracy": 0.5}), (99_500, EVERYTHING))
    for line in lines:
        assert len(line) <= 80 and "\x1b" not in line
        numbers = re.split(r" {2,}", re.sub(r"^step +\d+/100000 +", "", line))
        assert all(re.fullmatch(r"[a-z ]+ [-\d.:]+|[\d.,]+ [a-z/ ]+", part) for part in numbers), numbers
    assert "reward -12.346  held out 0.500" in lines[0] and "1.50 s/step" in lines[0]


def test_console_prints_about_200_lines_of_a_long_run():
    assert len(written(10_000, *((step, {"reward/mean": 0.5}) for step in range(1, 10_001)))) == 200


def test_console_on_a_terminal_shows_progress_and_numbers(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    sink = ConsoleSink(4, stream=stream)
    sink.write(3, {"reward/mean": 0.125})
    sink.close()
    assert "3/4" in stream.getvalue() and "reward 0.125" in stream.getvalue()


def test_a_plain_terminal_gets_no_control_characters(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for variable, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            stream = Terminal()
            ConsoleSink(4, stream=stream).write(3, {"reward/mean": 0.125})
            make_console(file=stream).print(Table("bold", title="title"))
            assert stream.getvalue().startswith("step 3/4  reward 0.125") and "\x1b" not in stream.getvalue()


def test_a_line_printed_beside_the_live_line_stands_above_it_in_one_piece(monkeypatch):
    """It may be a command to copy, such as wandb's."""
    monkeypatch.setenv("TERM", "xterm")
    stream, command = Terminal(), "wandb sync /" + "folder/" * 30
    monkeypatch.setattr(sys, "stdout", stream)
    sink = ConsoleSink(4)
    sink.write(1, {"reward/mean": 0.125})
    print(command)
    sink.close()
    assert f"{command}\n" in stream.getvalue()


def test_a_notebook_shows_a_bar_and_curves_and_the_last_step():
    shown = []
    sink = NotebookSink(3, show=shown.append)
    for step in range(3):
        sink.write(step, {"reward/mean": step / 2, "policy/kl": math.nan, "time/step_s": 1.0})
    sink.close()
    assert len(shown) == 2, "the first step at once, and what came within half a second when it closes"
    assert 'max="3" value="2"' in shown[-1] and "reward 1 (from 0 to 1)" in shown[-1]
    points = re.findall(r"([\d.]+),([\d.]+)", re.search('points="(.*?)"', shown[-1])[1])
    assert [float(x) for x, _ in points] == [0, 150, 300]
    assert [float(y) for _, y in points] == [66, 41, 16], "upwards on the page is downwards in pixels"
