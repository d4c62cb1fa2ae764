"""What a run prints is kept in its folder, without what only steers terminals, and with how it failed."""

import io
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import pytest

from hybrid_grpo.records import console_log
from hybrid_grpo.records.console_log import ConsoleLog


@contextmanager
def streams():
    """The streams of the process, replaced by buffers."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        yield out, err


def test_lines_and_the_failure_are_kept_and_live_lines_are_not(tmp_path):
    with streams() as (out, err):
        log = ConsoleLog(tmp_path)
        print("loading", "\x1b[31mred\x1b[0m")
        sys.stderr.write("WARNING: slow\n")
        sys.stdout.write("\x1b[1A\x1b[2Kstep 1\n")
        with pytest.raises(OSError, match="full"):
            try:
                raise OSError("the disk is full")
            finally:
                log.close()
        print("after")
        assert sys.stdout is out and sys.stderr is err
    text = (tmp_path / "console.log").read_text()
    assert text == "loading red\nWARNING: slow\nOSError: the disk is full\n"
    assert out.getvalue() == "loading \x1b[31mred\x1b[0m\n\x1b[1A\x1b[2Kstep 1\nafter\n"


def test_the_file_stays_small_and_one_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(console_log, "_MOST_BYTES", 100)
    with streams() as (out, _):
        log = ConsoleLog(tmp_path)
        for number in range(50):
            print(f"line {number:04}")
        log.close()
        log = ConsoleLog(tmp_path / "nothing")
        print("said")
        log.close()
    assert (tmp_path / "console.log.1").stat().st_size < 120 > (tmp_path / "console.log").stat().st_size
    assert "line 0049" in (tmp_path / "console.log").read_text()
    assert out.getvalue().endswith("line 0049\nsaid\n")
