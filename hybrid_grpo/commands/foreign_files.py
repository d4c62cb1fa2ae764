"""Reads recipes of other frameworks: YAML files, shell scripts with the command, Python scripts and notebooks."""

import ast
import json
import operator
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.config.foreign_names import conversions
from hybrid_grpo.config.recipes import load_yaml, read_value
from hybrid_grpo.records.files import flattened

_OPERATORS: Mapping[type, Any] = {
    kind: getattr(operator, name)
    for kind, name in ((ast.Add, "add"), (ast.Sub, "sub"), (ast.Mult, "mul"), (ast.Div, "truediv"))
}
_NO_VALUE = (KeyError, TypeError, IndexError, ZeroDivisionError, SyntaxError)
_CALLS = re.compile(r"(.*\.)?((GRPO|SFT|Reward|Lora)Config|GRPOTrainer|get_peft_model|\w*Model\w*\.from_pretrained)")
_LAST = re.compile(r".*\.py|-(?!\d).*|python3?|&&?|;|\|\|?|\d?>.*|\+{0,2}[\w.]+=.*")
"""What ends the values of an option on a command line."""
_SUM = re.compile(r"\$\(\((.*?)\)\)")


class Code(str):
    """Python code whose value is not known without running the script."""


def read_foreign(path: Path) -> tuple[str, str, dict[str, Any]]:
    """Return the framework whose recipe a file is, our command for it, and its settings there. Raises UserError."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
            text = re.sub(r"(?m)^\s*[!%].*$", "", "\n".join(cells))
        kinds = {".py": _of_python, ".ipynb": _of_python, ".yaml": _of_yaml, ".yml": _of_yaml, ".json": _of_yaml}
        names = kinds.get(path.suffix, _of_shell)(text)
    except (OSError, ValueError, SyntaxError, KeyError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    refuse(not names, f"{path} has no settings: give a YAML file, a shell script with the command, or a Python script")
    framework = next((name for name, mark in conversions()["marks"].items() if re.search(mark, text)), "TRL")
    stage = re.search(conversions()["stage"], text)
    command = "train" if not stage else "sft" if "sft" in stage[0].lower() else ""
    refuse(
        command == "", f"{path} trains a reward model: train it there, and name it in rewards (docs/rewards/models.md)"
    )
    renamed = conversions()["renamed"].get(framework, {})
    return framework, command, {renamed.get(n := name.replace("-", "_"), n): value for name, value in names.items()}


def evaluate(code: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression of numbers, texts and names. Raises KeyError for anything else."""
    match code:
        case ast.Constant():
            return code.value
        case ast.Name() | ast.Attribute():
            return names[ast.unparse(code)]
        case ast.List() | ast.Tuple():
            return [evaluate(part, names) for part in code.elts]
        case ast.BinOp() if type(code.op) in _OPERATORS:
            return _OPERATORS[type(code.op)](evaluate(code.left, names), evaluate(code.right, names))
        case ast.UnaryOp(op=ast.USub()):
            return -evaluate(code.operand, names)
        case ast.Subscript():
            return evaluate(code.value, names)[evaluate(code.slice, names)]
    raise KeyError(ast.unparse(code))


def formula(text: str, names: Mapping[str, Any]) -> Any:
    """Return the value of a formula; None if a name in it has no value, or one with which it cannot be computed."""
    try:
        return evaluate(ast.parse(text, mode="eval").body, names)
    except _NO_VALUE:
        return None


def _of_yaml(text: str) -> dict[str, Any]:
    settings = load_yaml(text)
    return dict(flattened(settings) if "actor_rollout_ref" in settings else settings)


def _of_shell(text: str) -> dict[str, Any]:
    """Read `--name value ...` and Hydra's `section.name=value`, with the variables that the script sets."""
    text = re.sub(r'(?m)(^|\s)#.*$|"?\$@"?', r"\1", text).replace("\\\n", " ")
    words = shlex.split(_SUM.sub(lambda found: "".join(found[0].split()), text))
    names: dict[str, Any] = {}
    variables = {"HOME": "~"}
    while words:
        word = words.pop(0)
        name, equals, value = word.lstrip("+-").partition("=")
        raw = [_expanded(value, variables)] if equals else []
        if equals and not word.startswith("--") and "." not in name:
            variables[name] = raw[0]
        elif name and (equals or word.startswith("--")):
            while not equals and words and (not _LAST.fullmatch(words[0]) or (not raw and words[0].endswith(".py"))):
                raw.append(_expanded(words.pop(0), variables))
            values = [read_value(part) for part in raw]
            names[name] = values[0] if len(values) == 1 else values or True
    launch = ("NPROC_PER_NODE", "NNODES", "CUDA_VISIBLE_DEVICES")
    return names and {**names, **{name: read_value(variables[name]) for name in launch if name in variables}}


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Return a word of a script with its variables (`$name`, `${name}`, `${name:-default}`) and sums replaced."""
    numbers = {name: read_value(part) for name, part in variables.items()}
    text = _SUM.sub(lambda found: f"{formula(found[1].replace('$', ''), numbers) or 0:.0f}", text)
    variable = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
    return variable.sub(lambda found: variables.get(found[1] or found[3], found[2] or found[0]), text)


def _of_python(text: str) -> dict[str, Any]:
    """Read the arguments of the calls that make a trainer and its model, with the script's variables."""
    nodes = list(ast.walk(ast.parse(text)))
    names: dict[str, Any] = {}
    variables: dict[str, Any] = {}
    configs: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, _value(node.value, variables)
            variables |= {} if isinstance(value, Code) else {name: value}
            called = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
            configs |= {name} if called.endswith("Config") and _CALLS.fullmatch(called) else set()
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        called = ast.unparse(call.func)
        places = [_value(part, variables) for part in call.args]
        arguments = {
            part.arg or f"**{ast.unparse(part.value)}": _value(part.value, variables) for part in call.keywords
        }
        if called.endswith("load_dataset") and "dataset_name" not in names:
            names |= dict(zip(("dataset_name", "dataset_config"), places, strict=False))
            names |= {"dataset_train_split": arguments["split"]} if "split" in arguments else {}
        elif _CALLS.fullmatch(called):
            names |= {"model_name_or_path": places[0]} if called.endswith("from_pretrained") and places else {}
            objects = called.endswith("GRPOTrainer")
            kept = ("reward_funcs", *(k for k in arguments if k.startswith("**")))
            names |= {k: v for k, v in arguments.items() if not objects or k in kept or type(v) is str}
    for target, code in ((node.targets[0], node.value) for node in nodes if isinstance(node, ast.Assign)):
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) in configs:
            names[f"{ast.unparse(target)}, set later:"] = _value(code, variables)
    return names


def _value(code: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(code, ast.List):
        return [_value(part, names) for part in code.elts]
    try:
        return evaluate(code, names)
    except _NO_VALUE:
        return Code(ast.unparse(code))
