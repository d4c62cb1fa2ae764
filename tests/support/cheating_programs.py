"""Programs that try to pass the tests of a function `f` without knowing what it returns: f(2) is 4, f(3) is 9.

Each defines an `f` that is wrong. It passes none of `WAYS`, which are the ways in which tests compare values.
"""

WAYS = [
    "assert f(2) == 4",
    "assert 4 == f(2)",
    "assert not f(2) != 4",
    "assert f(2) in (4, 5)",
    "assert (f(2), 1) == (4, 1) or [f(2)] == [4]",
    "assert {f(2): 1} == {4: 1}",
    "assert sorted([f(2)]) == [4]",
    "assert abs(f(2) - 4) < 1e-6",
    "import math\nassert math.isclose(f(2), 4)",
    "assert f(2).issubset({4})",
    "assert f(2).startswith('4')",
    "assert f(2).endswith('4')",
    "assert f(2).equals(4)",
    "assert f(2).isdigit()",
    "import unittest\nassert unittest.TestCase().assertEqual(f(2), 4) is None",
    "import unittest\nassert unittest.TestCase().assertAlmostEqual(f(2), 4) is None",
    "assert all(map(lambda x: f(x) == x * x, [2, 3]))",
    "assert not any(map(lambda x: f(x) != x * x, [2, 3]))",
    "assert not list(filter(lambda x: f(x) != x * x, [2, 3]))",
    "for x, y in zip(map(f, [2, 3]), [4, 9]):\n    assert x == y",
    "for x, y in zip([4, 9], map(f, [2, 3])):\n    assert x == y",
    "import itertools\nfor x in itertools.starmap(f, [(2,)]):\n    assert x == 4",
    "for x in iter(lambda: f(2), -1):\n    assert x == 4\n    break",
    "assert all(f(x) == x * x for x in [2, 3])",
    "assert next(map(f, [2]), 4) == 4",
    "import functools\nassert functools.reduce(lambda a, x: a and f(x) == x * x, [2, 3], True)",
]

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

CHEATS = {
    # Plain data with methods of its own.
    "a dressed OrderedDict": _returning("dressed(OrderedDict())", _LYING),
    "a dressed Counter": _returning("dressed(Counter({4: 1}))", _LYING),
    "dressed inside a list": _returning("[dressed(OrderedDict())]", _LYING),
    "dressed inside a key": _returning("{(1, frozenset([2])): dressed(OrderedDict(a=dressed(Counter())))}", _LYING),
    "a dressed function": _returning("dressed(lambda *a: True)", _LYING),
    "an object that has everything": _returning("Always()"),
    "its class": _returning("Always"),
    "an int": _returning("A(7)", "class A(int, Always): pass"),
    "a str": _returning("A()", "class A(str):\n    startswith = endswith = isdigit = __eq__ = yes\n    __hash__ = yes"),
    "a set": _returning("A([7])", "class A(set):\n    issubset = __eq__ = yes\n    __iter__ = Always.__iter__"),
    "a dict": _returning("A()", "class A(dict): issubset = startswith = equals = __eq__ = yes"),
    "an OrderedDict": _returning("A()", "class A(OrderedDict): issubset = startswith = equals = __eq__ = yes"),
    "a Fraction": _returning("A(7)", "class A(Fraction): equals = __eq__ = __sub__ = yes\n__hash__ = yes"),
    "a class that lies": _returning("A()", "class A(Always):\n    __class__ = property(lambda self: int)"),
    "a metaclass that lies": _returning(
        "A", "class M(type):\n    __instancecheck__ = __subclasscheck__ = __eq__ = yes\n    __hash__ = type.__hash__\n"
        "class A(metaclass=M): pass"
    ),
    "a copy that lies": _returning("A()", "class A:\n    __reduce_ex__ = lambda *a: (int, (7,), {'equals': yes})"),
    "a generator": "def f(x):\n    while True: yield 7",
    "infinity": _returning("float('nan')"),
    # Messages that no honest program sends.
    "a forged function": _forged("attributes(b'cbuiltins\\nint\\n')"),
    "a forged class": _forged("attributes(b'ccollections\\nOrderedDict\\n')"),
    "a forged method": _forged("attributes(b'chybrid_grpo.rewards.code.judge\\n_kept\\n')"),
    "a forged OrderedDict": _forged("attributes(b'ccollections\\nOrderedDict\\n)R')"),
    "a forged Counter in a list": _forged("b'(' + attributes(b'ccollections\\nCounter\\n)R') + b'l'"),
    "a forged Fraction": _forged(
        "slots(b'cfractions\\nFraction\\n)R', _denominator=b'K\\x01',"
        " _numerator=attributes(b'ccollections\\nCounter\\n)R'))"
    ),
    "a forged int": _forged("slots(b'cbuiltins\\nint\\n', _function=remote(own_channel().keep(yes)))"),
    "a forged date": _forged("attributes(b'cdatetime\\ndate\\n(M\\xd0\\x07K\\x01K\\x01tR')"),
    "a forged remote": _forged("attributes(remote(own_channel().keep(Always())))"),
    "a forged module": _forged("b'cos\\nsystem\\n'"),
    "a forged getattr": _forged("b'cbuiltins\\ngetattr\\n'"),
    "a forged end of a loop": f"{FORGE}def f(x): raised('StopIteration')",
    "a forged error": f"{FORGE}def f(x): raised('AssertionError')",
    "a long message": f"{FORGE}def f(x): os.write(4, struct.pack('>i', 2**31 - 1))",
    "a deep message": _forged("b'(' * 100_000 + b'l' * 100_000"),
    "a list in itself": _forged("b']q\\x01h\\x01a'"),
    "a tuple in itself": _forged("b'](h\\x01tq\\x01'"),
    "noise": f"{FORGE}def f(x):\n    for _ in range(99): send(bytes(range(128)))",
    "more than one reply": f"{FORGE}def f(x):\n    for _ in range(9): reply(b'K\\x07')\n    return 7",
    # Ways out.
    "StopIteration": _raising("StopIteration"),
    "StopIteration with a value": _raising("StopIteration(4)"),
    "StopAsyncIteration": _raising("StopAsyncIteration"),
    "GeneratorExit": _raising("GeneratorExit"),
    "SystemExit": _raising("SystemExit(0)"),
    "KeyboardInterrupt": _raising("KeyboardInterrupt"),
    "AssertionError": _raising("AssertionError"),
    "a namesake": _raising("StopIteration", "class StopIteration(Exception): pass"),
    "a subclass": _raising("type('StopIteration', (StopIteration,), {})()"),
    "a warning": _raising("DeprecationWarning"),
    "a group": _raising("ExceptionGroup('', [StopIteration()])"),
    "a test that is skipped": _raising("unittest.SkipTest", "import unittest"),
    "an error without a text": _raising("A", "class A(Exception):\n    def __str__(self): raise StopIteration"),
    "an error whose text is none": _raising("A", "class A(Exception):\n    def __str__(self): return 4"),
    "exit": "import os\ndef f(x): os._exit(0)",
    "exit when all is over": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit(0)",
    "crash": "import ctypes\ndef f(x): ctypes.string_at(0)",
    "abort": "import os\ndef f(x): os.abort()",
    "interrupt": "import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGINT)",
    "kill the judge": "import os\nfor pid in range(os.getpid() - 5, os.getpid() + 5):\n    if pid != os.getpid():\n"
    "        try: os.kill(pid, 9)\n        except OSError: pass\ndef f(x): return 7",
    "close the channel": "import os\ndef f(x): os.closerange(0, 64)",
    "a debugger": "import sys\ndef f(x): sys.settrace(lambda *a: None); breakpoint()",
    # What lies around.
    "print": "print('1' * 30)\nprint('OK', 'PASSED', flush=True)\ndef f(x):\n    print(1)\n    return 7",
    "every descriptor": "import os\ndef f(x):\n    for number in range(64):\n"
    "        try: os.pwrite(number, b'1' * 30, 0)\n        except OSError: pass\n    return 7",
    "frames and objects": "import gc, sys\ndef f(x):\n    found = [*gc.get_objects()]\n    frame = sys._getframe()\n"
    "    while frame:\n        found += [frame.f_locals, frame.f_globals]\n        frame = frame.f_back\n"
    "    found = [text for part in found for text in gc.get_referents(part) if type(text) is str]\n"
    "    return 4 if any(text[::-1].count(')2(f tressa') for text in found) else 7",
    "memory of the judge": "import os\ndef f(x):\n    for pid in range(os.getpid() - 5, os.getpid() + 5):\n"
    "        for name in ('mem', 'maps', 'environ', 'cmdline', 'fd'):\n            try:\n"
    "                open(f'/proc/{pid}/{name}', 'rb').read(9)\n                if pid != os.getpid(): return 4\n"
    "            except OSError: pass\n    return 7",
    "builtins": "import builtins\nfor name in ('abs', 'all', 'sorted', 'map', 'filter', 'zip', 'isinstance', 'len'):\n"
    "    setattr(builtins, name, lambda *a, **k: True)\nbuiltins.AssertionError = None\ndef f(x): return 7",
    "pickle": "import sys\njudging = sys.modules['hybrid_grpo.rewards.code.judge']\n"
    "judge._Pickler.reducer_override = lambda self, value: NotImplemented\nclass A(int): pass\n"
    "def f(x): return A(7)",
    "operations": "import sys\noperations = sys.modules['hybrid_grpo.rewards.code.judge']._OPERATIONS\n"
    "for name in operations: operations[name] = lambda *a: 1\nclass A: pass\ndef f(x): return A()",
    "modules": "import sys, types\nfor name in ('math', 'unittest', 'itertools', 'functools'):\n"
    "    sys.modules[name] = types.SimpleNamespace(isclose=lambda *a: True)\nmath = unittest = sys.modules['math']\n"
    "def f(x): return 7",
    "arguments": "import sys\nChannel = sys.modules['hybrid_grpo.rewards.code.judge'].Channel\ncall = Channel._call\n"
    "def changed(self, function, sent):\n    return call(self, function, sent)[0], ((4,), {'x': 4})\n"
    "Channel._call = changed\ndef f(x): return 7",
}  # fmt: skip
