"""Compares the settings of runs with each other and with the defaults, those that matter most first."""

import functools
from collections.abc import Mapping
from typing import Any

from hybrid_grpo.config import SftConfig, TrainConfig
from hybrid_grpo.config.building import to_dict
from hybrid_grpo.config.composition import about
from hybrid_grpo.records.files import as_json, flattened

OF_EVERY_RUN = ("run.name", "run.dir")
"""Settings that differ by nature and are not compared."""
_LONGEST_VALUE = 1000


def compared(settings: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings of runs, given by the run's name, in the order of importance. Each has its `name`, its
    `values` by run, its `default` (None if it has none), whether runs `differ` in it, and whether a run has `changed`
    it from the default."""
    texts = {run: _texts(of) for run, of in settings.items()}
    names = dict.fromkeys(name for values in texts.values() for name in values)
    defaults = {name: value for of in settings.values() for name, value in _defaults(frozenset(of)).items()}
    missing = {name for name in names if any(name not in of for of in texts.values())}

    def entry(name: str) -> dict[str, Any]:
        values, default = {run: of.get(name) for run, of in texts.items()}, defaults.get(name)
        is_compared = name not in OF_EVERY_RUN
        return {
            "name": name, "values": values, "default": default,
            "differ": is_compared and len(set(values.values())) > 1,
            "changed": is_compared and default is not None and not set(values.values()) <= {None, default},
        }  # fmt: skip

    # What only some of the runs have says little: they are of different commands or versions.
    return [entry(name) for name in sorted(names, key=lambda name: (name in missing, importance(name)))]


def importance(name: str) -> int:
    """Return the rank of a setting in the order of importance; 0 is the most important."""
    setting = about(name)
    return setting.rank if setting.rank is not None else 13 if setting.is_place else 12


def _texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return settings by their dotted names, each value as JSON, but text without quotes; long values are cut."""
    return {
        name: (value if isinstance(value, str) else as_json(value))[:_LONGEST_VALUE]
        for name, value in flattened(dict(settings))
    }


@functools.lru_cache(maxsize=8)
def _defaults(sections: frozenset[str]) -> dict[str, str]:
    """Return the defaults of the training command that has the most of these sections."""
    known = [to_dict(TrainConfig()), to_dict(SftConfig())]
    return _texts(max(known, key=lambda of: len(sections & of.keys()) - len(of.keys() - sections)))
