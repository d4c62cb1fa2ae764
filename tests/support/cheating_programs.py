"""Programs that try to pass the tests of a function `f` without knowing what it returns: f(2) is 4, f(3) is 9.

Each defines an `f` that is wrong. It passes none of `WAYS`, which are the ways in which tests compare values. The
programs are in cheating_programs.yaml.
"""

from pathlib import Path
from typing import Any

import yaml

FORGE = """
import os, pickle, struct
from collections import Counter, OrderedDict
from fractions import Fraction
def yes(*args): return True
class Always:
    def __getattr__(self, name): return yes
    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __sub__ = __rsub__ = __abs__ = yes
    def __hash__(self): return 4
    def __iter__(self):
        while True: yield 4
def send(message): os.write(4, struct.pack('>i', len(message)) + message)
text = lambda word: b'X' + struct.pack('<I', len(word)) + word.encode()
# The functions that this process has sent are known there by a number: `yes` is made to be one of them.
judge = __import__('sys').modules['hybrid_grpo.rewards.code.judge']
channel = None
def own_channel():
    import gc
    return next(o for o in gc.get_objects() if type(o) is judge.Channel)
remote = lambda number: (b'chybrid_grpo.rewards.code.judge\\n_kept\\n' + text('sender') + b'K' + bytes([number])
                         + b'\\x86R')
def attributes(value, names='issubset startswith endswith equals isdigit __eq__'):
    number = own_channel().keep(yes)
    return value + b'}(' + b''.join(text(name) + remote(number) for name in names.split()) + b'ub'
def slots(value, **parts):
    return value + b'N}(' + b''.join(text(name) + part for name, part in parts.items()) + b'u\\x86b'
def reply(value): send(b'\\x80\\x04' + text('value') + value + b'N\\x86\\x86.')
def raised(name): send(b'\\x80\\x04' + text('raised') + text(name) + text('') + b'\\x87.')
"""


def _forged(value: str) -> str:
    return f"{FORGE}def f(x):\n    reply({value})\n    return 7"


def _raising(error: str, before: str = "") -> str:
    return f"{before}\ndef f(x):\n    raise {error}"


def _returning(value: str, before: str = "") -> str:
    return f"{FORGE}{before}\ndef f(x):\n    return {value}"


_LYING = """
def dressed(value):
    for name in ('issubset', 'startswith', 'endswith', 'equals', 'isdigit', '__eq__', '__iter__'):
        value.__dict__[name] = yes
    return value
"""

_TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
WAYS: list[str] = _TABLE["ways"]
CHEATS: dict[str, str] = {
    **{name: _returning(value, _LYING) for name, value in _TABLE["dressed"].items()},
    **{name: _returning(*given) for name, given in _TABLE["returning"].items()},
    **{name: _forged(value) for name, value in _TABLE["forged"].items()},
    **{name: FORGE + program for name, program in _TABLE["forging"].items()},
    **{name: _raising(*given) for name, given in _TABLE["raising"].items()},
    **_TABLE["programs"],
}
