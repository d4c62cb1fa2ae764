import pytest
from run_folder import make_run


@pytest.fixture
def folder(tmp_path):
    """A run of two steps; see `make_run`."""
    make_run(tmp_path / "runs" / "first")
    return tmp_path / "runs" / "first"
