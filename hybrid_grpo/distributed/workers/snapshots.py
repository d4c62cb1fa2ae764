"""Snapshots of objects: they carry an object's attributes from the worker process where it lives to other processes.

An object is pickled attribute by attribute in the process where it lives, carried as text, and restored in the process
that uses it, but never in the rank.
"""

import pickle
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any

from hybrid_grpo.config.user_code import describe, import_place

_LARGEST = 1 << 20
"""Bytes of a pickled attribute; larger ones are left out."""


@dataclass(frozen=True)
class Snapshot:
    """An object that is restored by the process to which it is sent."""

    state: dict[str, Any]
    """The object's attributes, as returned by `state_of`."""


def state_of(instance: Any, place: str) -> dict[str, Any]:
    """Return all attributes of an object, in JSON types; `place` is the file or module that defines its class. An
    attribute that cannot be carried is listed with the reason."""
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


def restored(snapshot: Snapshot) -> Any:
    """Rebuild the object with the attributes that were carried; others raise AttributeError with the reason."""
    state = snapshot.state
    import_place(state["place"], "an object of another process")
    kind = pickle.loads(b64decode(state["class"]))
    missing: dict[str, str] = state["missing"]
    if missing:

        def refuse(_: Any, name: str) -> Any:
            where = f" outside of its process: {missing[name]}" if missing.get(name) else ""
            raise AttributeError(f"{kind.__name__} has no {name}{where}")

        kind = type(kind.__name__, (kind,), {"__getattr__": refuse, "__module__": kind.__module__})
    instance = object.__new__(kind)
    for name, pickled in state["attributes"].items():
        instance.__dict__[name] = pickle.loads(b64decode(pickled))
    return instance
