"""A user who writes recipes and command lines in a folder."""

from pathlib import Path

import pytest
from user import User


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path)
