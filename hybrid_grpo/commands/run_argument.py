"""A run as the first argument of a command, in place of its recipe and its trained model."""

from pathlib import Path

from hybrid_grpo.config.errors import refuse


def is_run(name: str) -> bool:
    """Whether this is the folder of a run, which has its settings in config.yaml."""
    return bool(name) and (Path(name) / "config.yaml").is_file()


def options_of_run(name: str) -> list[str]:
    """Return the options that a run stands for: its settings, and its trained model. Raises UserError without one."""
    folder = Path(name)
    trained = (folder / "model" / "config.json").is_file()
    refuse(not trained, f"{name}: the run has no trained model yet: give a model, or a run that is finished")
    return ["--config", f"{folder}/config.yaml", "--policy.model", f"{folder}/model"]
