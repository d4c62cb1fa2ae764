"""The object of an environment as it was at the end of a completion, on its way to the reward functions.

It is pickled attribute by attribute in the process where it lived, carried as text, and made again in the process that
calls a function; never in the rank. Needs no torch.
"""

from __future__ import annotations

import pickle
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any

from hybrid_grpo.config.importing import describe, import_place

_LARGEST = 1 << 20
"""Bytes of an attribute that is carried."""


@dataclass(frozen=True)
class Carried:
    """An object on its way."""

    state: dict[str, Any]
    """See `state_of`."""


def state_of(instance: Any, place: str) -> dict[str, Any]:
    """All attributes of an object, in types that JSON has; `place` is the file or module of its entry. What cannot be
    carried is named with the reason."""
    attributes, missing = {}, {}
    for name, value in getattr(instance, "__dict__", {}).items():
        try:
            pickled = pickle.dumps(value)
        except Exception as error:
            missing[name] = f"it cannot be pickled: {describe(error, None)}"
            continue
        if len(pickled) > _LARGEST:
            missing[name] = f"it has {len(pickled)} bytes, more than {_LARGEST}"
        else:
            attributes[name] = b64encode(pickled).decode()
    try:
        kind = b64encode(pickle.dumps(type(instance))).decode()
    except Exception as error:
        raise ValueError(f"its class cannot be named: {describe(error, None)}: define it in a module") from None
    return {"place": place, "class": kind, "attributes": attributes, "missing": missing}


def restored(carried: Carried) -> Any:
    """An object of the same class with the attributes that were carried; asking for another raises AttributeError,
    which says why it is missing."""
    state = carried.state
    import_place(state["place"], "rollout.environment")
    kind = pickle.loads(b64decode(state["class"]))
    missing: dict[str, str] = state["missing"]
    if missing:
        kind = type(kind.__name__, (kind,), {"__getattr__": _told(kind, missing), "__module__": kind.__module__})
    instance = object.__new__(kind)
    for name, pickled in state["attributes"].items():
        instance.__dict__[name] = pickle.loads(b64decode(pickled))
    return instance


def _told(kind: type, missing: dict[str, str]) -> Any:
    def __getattr__(self: Any, name: str) -> Any:
        why = missing.get(name)
        raise AttributeError(f"{kind.__name__} has no {name}" + (f" outside of its process: {why}" if why else ""))

    return __getattr__
