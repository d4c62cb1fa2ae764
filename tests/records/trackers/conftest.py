import pytest
from PIL import Image
from run_folder import make_run, rows, write_lines

from hybrid_grpo.records.thumbnails import FOLDER


@pytest.fixture
def folder(tmp_path):
    """A run of two steps; see `make_run`."""
    make_run(tmp_path / "runs" / "first")
    return tmp_path / "runs" / "first"


@pytest.fixture
def seeing(folder):
    """The run, of which the prompts have two pictures, and a third whose copy is missing."""
    (folder / FOLDER).mkdir()
    for number in (1, 2):
        Image.new("RGB", (number, 3)).save(folder / FOLDER / f"{number}.png")
    pictures = [{"file": f"{number}.png", "name": f"{number}", "size": [number, 3]} for number in (1, 2, 3)]
    (folder / "rollouts" / "step_000001.jsonl").unlink()
    write_lines(folder / "rollouts" / "step_000001.jsonl", [row | {"pictures": pictures} for row in rows(1)])
    return folder
