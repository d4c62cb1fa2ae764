"""A person at the command line, for tests of what settings become and what is refused."""

from pathlib import Path

import pytest

from hybrid_grpo.config import SftConfig, TrainConfig
from hybrid_grpo.config.checks import check_sft, check_train
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.parsing import parse


class User:
    """Somebody at the command line, with a folder that passes for a model and one row of data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        (folder / "train.jsonl").write_text('{"prompt": "a"}\n')
        self.sound = ["--policy.model", f"{folder / 'model'}", "--data.path", f"{folder / 'train.jsonl'}"]

    def yaml(self, text: str) -> str:
        path = self.folder / "recipe.yaml"
        path.write_text(text)
        return str(path)

    def parse(self, *arguments: str, yaml: str | None = None) -> TrainConfig:
        recipe = [] if yaml is None else ["--config", self.yaml(yaml)]
        return parse(TrainConfig, [*recipe, *arguments], "train").config

    def train(self, *arguments: str, yaml: str | None = None, ranks: int = 1) -> TrainConfig:
        recipe = [] if yaml is None else ["--config", self.yaml(yaml)]
        rewards = ["--rewards", "[{function: exact_match}]"]
        config = parse(TrainConfig, [*self.sound, *rewards, *recipe, *arguments], "train").config
        check_train(config, ranks)
        return config

    def sft(self, *arguments: str, ranks: int = 1) -> SftConfig:
        config = parse(SftConfig, [*self.sound, *arguments], "sft").config
        check_sft(config, ranks)
        return config

    def refused(self, *arguments: str, yaml: str | None = None, ranks: int = 1, sft: bool = False) -> str:
        with pytest.raises(UserError) as caught:
            self.sft(*arguments, ranks=ranks) if sft else self.train(*arguments, yaml=yaml, ranks=ranks)
        message = str(caught.value)
        assert message and "\n" not in message
        assert "pydantic" not in message and "validation error" not in message and "class_path" not in message
        return message
