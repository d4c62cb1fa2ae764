"""Names and values of settings in other frameworks, so that users of those are shown what is used here."""

import functools
from collections.abc import Collection
from pathlib import Path
from typing import Any

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
    for framework, renamed in conversions()["renamed"].items():
        found[framework] |= {new: name_here(old, framework, found) or "" for new, old in renamed.items()}
    return found


@functools.cache
def conversions() -> dict[str, Any]:
    """Return the values, formulas and defaults of foreign_values.yaml."""
    found: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "foreign_values.yaml").read_text(encoding="utf-8"))
    return found


def name_here(name: str, framework: str, known: dict[str, dict[str, str]] | None = None) -> str | None:
    """Return what a framework's name is here, or else another's, in `foreign_names` or `known`; None if unknown."""
    tables = [(known or foreign_names())[framework], *(known or foreign_names()).values()]
    return next((table[part] for part in (name, name.rpartition(".")[2]) for table in tables if part in table), None)


def value_here(value: Any, *names: str) -> Any:
    """Return what a value of theirs is here: another value, or a mapping of settings; unchanged if it is no other. Of
    `names`, by which it is looked up, the first with a table holds."""
    tables = conversions()["values"]
    table: dict[str, Any] = next((tables[name] for name in names if name in tables), {})
    if isinstance(value, list):
        parts = [value_here(part, *names) for part in value]
        return [part for part in parts if part != {}] or {}
    return table.get(str(value).lower(), table.get("*", value))


def foreign_name(name: str, known: Collection[str], whole: bool = False) -> str | None:
    """Return a message such as `TRL's num_generations is rollout.num_generations`. None if no framework has the name,
    or if our setting is not among the command's settings, `known`. `whole`: not by the last part of the name."""
    return next(iter(foreign_answers([name], known, whole)[0]), None)


def foreign_answers(names: Collection[str], known: Collection[str], whole: bool = False) -> tuple[list[str], list[str]]:
    """Return such messages for several names, together where the answer is the same, and the names without an answer.
    A name of several frameworks is taken for one of the framework that has most of the names."""
    tables = sorted(foreign_names().items(), key=lambda table: -sum(name in table[1] for name in names))
    found: dict[tuple[str, str], list[str]] = {}
    left = []
    for name in names:
        spellings = dict.fromkeys([name.replace("-", "_"), name if whole else name.rpartition(".")[2]])
        options = ((of, part, table[part]) for part in spellings for of, table in tables if part in table)
        # Ours is a setting of the command, possibly with words after it, or what to do instead.
        is_ours = (o for o in options if o[2].startswith("nothing") or "`" in o[2] or o[2].split(" ")[0] in known)
        framework, spelled, ours = next(is_ours, ("", name, ""))
        if framework:
            found.setdefault((framework, ours), []).append(spelled)
        else:
            left.append(name)
    answers, last = [], ""
    for (framework, ours), theirs in found.items():
        one, whose = len(theirs) == 1, "" if framework == last else f"{framework}'s "
        verb = ("has" if one else "have") if ours.startswith("nothing") else "is" if one else "are"
        answers.append(f"{whose}{', '.join(theirs)} {verb} {ours}")
        last = framework
    return answers, left
