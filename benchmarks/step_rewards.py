"""The reward of step.py's workloads without a task: cheap, deterministic, and different within a group."""


def scattered(completion_ids: list[list[int]]) -> list[float]:
    """A number in [0, 1] computed from the completion's tokens."""
    return [sum(ids) % 97 / 96 for ids in completion_ids]
