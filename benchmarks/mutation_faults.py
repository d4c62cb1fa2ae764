"""The faults of benchmarks/mutation.py: mutmut's changes to a syntax tree, except those that cannot change behavior.

Left out, since either no test or every test would find them: annotations, names of types, decorators, imports, strings
(names and messages), raise and assert statements, printed text, `strict` of a zip, `encoding` and `indent` of a file,
`prefix` of a temporary file, and devices (the tests have one).
"""

import difflib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

_WITHOUT_BEHAVIOUR = (
    *(cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom, cst.Raise, cst.Assert),
    *(cst.SimpleString, cst.ConcatenatedString, cst.FormattedString),
)
_SAYING = {"print", "warn", "say", "UserError", "RunStopped", "cast", "TypeVar"}
_ALWAYS_FOUND = {"len", "isinstance", "refuse"}
"""Functions whose arguments are all required; those of `refuse` are a condition, which is changed, and a message."""
_ARGUMENTS = {"strict", "encoding", "device", "non_blocking", "pin_memory", "indent", "prefix"}
_TYPE = re.compile("_?[A-Z][a-z]")
_COMPOUND = (cst.If, cst.For, cst.While, cst.With, cst.FunctionDef, cst.ClassDef, cst.ExceptHandler)


@dataclass(frozen=True)
class Fault:
    """One change at one place of a file.

    Attributes:
        file: relative to the repository.
        lines: first and last line of the statement, or of the head of a compound one.
        kind: mutmut's name for the change.
        code: the whole file with the change.
        diff: what was changed.
    """

    file: str
    lines: tuple[int, int]
    kind: str
    code: str
    diff: str


Change = tuple[str, cst.CSTNode]
Place = tuple[cst.CSTNode, tuple[int, int], list[Change]]


def draw(root: Path, files: Sequence[str], number: int, seed: int) -> tuple[list[Fault], int]:
    """Random faults, and the number of places. Every place of all files is equally likely, and so is each of its
    changes."""
    modules = {file: MetadataWrapper(cst.parse_module((root / file).read_text())) for file in files}
    places = [(file, place) for file, module in modules.items() for place in _places(module)]
    chance = random.Random(seed)
    drawn = chance.sample(places, min(number, len(places)))
    return [_fault(file, modules[file].module, place, chance) for file, place in drawn], len(places)


def _fault(file: str, module: cst.Module, place: Place, chance: random.Random) -> Fault:
    node, lines, changes = place
    kind, changed = chance.choice(changes)
    code = module.deep_replace(node, changed).code  # type: ignore[arg-type]
    diff = difflib.unified_diff(module.code.splitlines(), code.splitlines(), file, file, "", "", n=1, lineterm="")
    return Fault(file, lines, kind, code, "\n".join(list(diff)[2:]))


def _places(module: MetadataWrapper) -> list[Place]:
    visitor = _Visitor()
    module.visit(visitor)
    return visitor.places


class _Visitor(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.places: list[Place] = []
        self._lines = (1, 1)

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, (cst.SimpleStatementLine, cst.SimpleStatementSuite, *_COMPOUND)):
            span = self.get_metadata(PositionProvider, node)
            last = span.end.line
            if isinstance(node, _COMPOUND):
                last = max(span.start.line, self.get_metadata(PositionProvider, node.body).start.line - 1)
            self._lines = (span.start.line, last)
        if _without_behavior(node):
            return False
        if changes := list(_changes(node)):
            self.places.append((node, self._lines, changes))
        return True


def _without_behavior(node: cst.CSTNode) -> bool:
    match node:
        case cst.Call(func=cst.Name(value=name) | cst.Attribute(attr=cst.Name(value=name))):
            return name in _SAYING
        case cst.Arg():
            return _is_told(node)
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))]):
            return bool(_TYPE.match(name)) or name == "device" or _is_message(node.value)
    return isinstance(node, _WITHOUT_BEHAVIOUR)


def _changes(node: cst.CSTNode) -> Iterator[Change]:
    for kind, operator in mutation_operators:
        if not isinstance(node, kind):
            continue
        for changed in operator(node):
            if isinstance(node, cst.Call) and isinstance(changed, cst.Call):
                if isinstance(node.func, cst.Name) and node.func.value in _ALWAYS_FOUND:
                    continue
                kept = {id(argument) for argument in changed.args}
                if any(_is_told(argument) for argument in node.args if id(argument) not in kept):
                    continue
            yield operator.__name__.removeprefix("operator_"), changed


def _is_told(argument: cst.Arg) -> bool:
    """Whether an argument is a message, a device, or a name without effect on behavior."""
    named = argument.keyword is not None and argument.keyword.value in _ARGUMENTS
    match argument.value:
        case cst.Name(value=name) | cst.Attribute(attr=cst.Name(value=name)):
            return named or name in ("device", "_device")
    return named or _is_message(argument.value)


def _is_message(value: cst.CSTNode) -> bool:
    """Whether a string is a message: names do not contain spaces."""
    if isinstance(value, cst.ConcatenatedString | cst.FormattedString):
        return True
    return isinstance(value, cst.SimpleString) and " " in value.value
