"""Names of settings in other frameworks, so that users of those frameworks are shown the names used here."""

import functools
from collections.abc import Collection
from pathlib import Path

import yaml

from hybrid_grpo.config.features import feature_folders


@functools.cache
def foreign_names() -> dict[str, dict[str, str]]:
    """Return each framework's setting names, each with our name or what to do instead (foreign_names.yaml)."""
    folders = [Path(__file__).parent, *feature_folders()]
    found: dict[str, dict[str, str]] = {}
    for file in (folder / "foreign_names.yaml" for folder in folders):
        if file.exists():
            for framework, names in yaml.safe_load(file.read_text(encoding="utf-8")).items():
                found.setdefault(framework, {}).update(names)
    return found


def foreign_name(name: str, known: Collection[str]) -> str | None:
    """Return a message such as `TRL's num_generations is rollout.num_generations`. None if no framework has the name,
    or if our setting is not among the command's settings, `known`."""
    for spelled in dict.fromkeys([name, name.rpartition(".")[2]]):
        for framework, names in foreign_names().items():
            ours = names.get(spelled)
            if ours is None:
                continue
            if ours.startswith("nothing"):
                return f"{framework}'s {spelled} has {ours}"
            if "`" in ours or ours.split(" ")[0] in known:
                return f"{framework}'s {spelled} is {ours}"
    return None
