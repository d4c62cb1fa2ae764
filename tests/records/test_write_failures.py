"""The reason of a failed write, in words."""

import errno
import os
from types import SimpleNamespace

import pytest

from hybrid_grpo.records import write_failures


@pytest.mark.parametrize("files, free, reason", [
    (1000, 7, "report.html: No space left on device"),
    (1000, 0, "the file system has no inodes left for new files (df -i)"),
    (0, 0, "report.html: No space left on device"),
])  # fmt: skip
def test_a_file_system_without_inodes_is_not_called_full(tmp_path, monkeypatch, files, free, reason):
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "report.html"))
    limits = SimpleNamespace(f_files=files, f_favail=free)
    monkeypatch.setattr(write_failures.os, "statvfs", lambda folder: limits)
    assert write_failures.why(error, tmp_path / "not" / "there") == reason
