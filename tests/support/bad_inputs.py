"""Inputs that cannot work, and a program that gives commands one after the other to one process.

`python bad_inputs.py CASES RESULTS`, in a workshop's folder, runs every case of a JSON file, a list of `[arguments,
environment]`, by `hybrid_grpo.__main__.main`, and writes what it did. A process for each would spend seconds on
importing alone.
"""

import json
import os
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from hybrid_grpo import __main__ as program

BINARY = Random(0).randbytes(5000)


@dataclass(frozen=True)
class Ended:
    """What a command has done: its exit status, output and seconds, and whether it has left a run behind."""

    status: int
    out: str
    err: str
    seconds: float
    left: bool


def run_case(arguments: list[str], environment: dict[str, str]) -> Ended:
    """One command in this process, in its working folder, as a user would give it."""
    before = dict(os.environ)
    os.environ.update(environment)
    kept = [os.dup(number) for number in (1, 2)]
    start = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            status = program.main(arguments)
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
            status = 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
            os.environ.clear()
            os.environ.update(before)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    left = Path("runs").exists()
    shutil.rmtree("runs", ignore_errors=True)
    return Ended(status, texts[0], texts[1], time.monotonic() - start, left)


def make_settings(folder: Path) -> None:
    """Recipes and data that are refused before anything is loaded."""
    bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
    bomb += "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
    files: dict[str, str | bytes] = {
        "recursive.yaml": "engine: {deepspeed: &d {a: *d}}\n", "bomb.yaml": bomb + "engine: {deepspeed: {a: *a9}}\n",
        "binary.yaml": BINARY, "deep.yaml": "engine: {deepspeed: " + "{a: " * 3000 + "1" + "}" * 3000 + "}\n",
        "tag.yaml": "policy: !!python/object:os.system {}\n", "list.yaml": "- a\n",
        "nul.yaml": b"policy: {model: 'a\0b'}\n", "two.yaml": "run: {}\n---\nrun: {}\n",
        "half.yaml": 'data: {system_prompt: "\\ud800"}\n', "twice.yaml": "run: {steps: 1, steps: 2}\n",
        "typo.yaml": "polcy: {lr: 1}\n", "unused.yaml": "checkpoint: {evry: 3}\n",
        "other.yaml": "sft: {batch_sise: 3}\n", "grpo.yaml": "grpo: {beta: 0.1}\n", "empty.yaml": "",
        "section.yaml": "policy: 3\n", "date.yaml": "policy: {lr: 2026-99-01}\n", "empty.jsonl": "",
        "nomodel/readme": "", "binaryrun/metrics.jsonl": BINARY, "binaryrun/config.yaml": "rewards: [exact_match]\n",
        "binaryrun/rollouts/step_000001.jsonl": BINARY, "copyrun/config.yaml": "rewards: [exact_match]\n",
        "copyrun/rollouts/step_copy.jsonl": "{}\n", "listrun/metrics.jsonl": "[1]\n", "emptyrun/metrics.jsonl": "",
    }  # fmt: skip
    for name, content in files.items():
        write(folder / name, content)
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "loop.jsonl").symlink_to("loop.jsonl")


def make_loaded(folder: Path) -> None:
    """Data, models, tokenizers and reward files that are looked into."""
    row = '{"prompt": "%s", "answer": "a", "completion": "x"}\n'
    files: dict[str, str | bytes] = {
        "blank.jsonl": "\n\n", "noprompt.jsonl": '{"question": "a=", "answer": "a"}\n', "binary.jsonl": BINARY,
        "binary.parquet": BINARY, "deep.jsonl": "[" * 100_000 + "\n", "list.jsonl": "[1]\n",
        "half.jsonl": row % "a\\ud800=" * 12, "number.jsonl": '{"prompt": 3}\n', "huge.jsonl": row % ("a" * 60_000_000),
        "digits.jsonl": '{"prompt": "a=", "answer": ' + "9" * 5000 + "}\n",
        "chat.jsonl": '{"prompt": [{"role": "user", "content": "a="}], "answer": "a"}\n' * 12,
        "nocompletion.jsonl": '{"prompt": "a"}\n', "data.txt": "a\n", "loops.py": "while True: pass\n",
        "exits.py": "import sys; sys.exit(3)\n", "dies.py": "import os; os._exit(1)\n",
        "raises.py": "raise OSError('x\\ny')\n", "syntax.py": "def (\n", "binary.py": bytes(range(256)),
        "functions.py": "f = 3\ndef needs(completions, nothere): pass\n",
    }  # fmt: skip
    for name, content in files.items():
        write(folder / name, content)
    _make_configurations(folder)
    _make_weights(folder)
    _make_tokenizers(folder)


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def _model(folder: Path, name: str, **changes: Any) -> Path:
    """A copy of the workshop's model, of three layers of width 128, with another configuration."""
    shutil.copytree(folder / "model", folder / name)
    path = folder / name / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder / name


def _make_configurations(folder: Path) -> None:
    _model(folder, "fewer_layers", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    _model(folder, "more_layers", num_hidden_layers=5, layer_types=["full_attention"] * 5)
    for name, value in [
        *[("hidden_size", 64), ("intermediate_size", 100), ("vocab_size", 20), ("num_key_value_heads", 4)],
        *[("layer_types", ["full_attention"] * 2), ("layer_types", "full"), ("num_hidden_layers", -1)],
        *[("hidden_size", "wide"), ("hidden_act", "nope"), ("eos_token_id", 999), ("model_type", "nope")],
        ("rope_parameters", {"rope_type": "nope", "rope_theta": 1}),
    ]:
        _model(folder, f"{name}_{value if isinstance(value, (int, str)) else type(value).__name__}", **{name: value})
    code = _model(
        folder, "code", model_type="mine", auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    )
    (code / "code.py").write_text("open('code_has_run', 'w')\n")
    _model(folder, "few_positions", max_position_embeddings=10)
    write(folder / "t5/config.json", '{"model_type": "t5"}')
    for name, text in {"brackets": "[" * 100_000, "a_list": "[]", "garbage": "{{{", "nothing": ""}.items():
        (_model(folder, name) / "config.json").write_text(text)
    (_model(folder, "eos_generation") / "generation_config.json").write_text('{"eos_token_id": 999}')
    (_model(folder, "eos_text") / "generation_config.json").write_text('{"eos_token_id": "stop"}')
    (_model(folder, "bad_generation") / "generation_config.json").write_text("{{{")


def _make_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights, content = load_file(folder / "model/model.safetensors"), (folder / "model/model.safetensors").read_bytes()
    norm = weights["model.norm.weight"]
    changed = {
        "nan": {**weights, "model.norm.weight": norm * float("nan")},
        "infinite": {**weights, "model.norm.weight": norm / 0},
        "lacking": {name: weight for name, weight in weights.items() if "1.self_attn.q_proj.weight" not in name},
    }
    for name, tensors in changed.items():
        save_file(tensors, _model(folder, name) / "model.safetensors", metadata={"format": "pt"})
    for name, written in {
        "cut": content[: len(content) // 2],
        "empty_file": b"",
        "noise": BINARY,
        "long_header": struct.pack("<Q", 1 << 60) + b"{}",
        "list_header": struct.pack("<Q", 2) + b"[]",
    }.items():
        (_model(folder, name) / "model.safetensors").write_bytes(written)
    for name, index in {
        "no_part": '{"weight_map": {"model.norm.weight": "gone.safetensors"}}',
        "bad_index": "{{",
    }.items():
        model = _model(folder, name)
        (model / "model.safetensors").unlink()
        (model / "model.safetensors.index.json").write_text(index)
    (_model(folder, "noweights") / "model.safetensors").unlink()


def _make_tokenizers(folder: Path) -> None:
    def changed(name: str, file: str, change: Callable[[Any], Any]) -> None:
        path = _model(folder, name) / file
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    for name, template in {
        **{"t_syntax": "{% for", "t_raises": "{{ raise_exception('no') }}", "t_divides": "{{ 1/0 }}"},
        **{"t_range": "{% for i in range(999999999) %}{% endfor %}", "t_missing": "{{ messages[5].x.y }}"},
    }.items():
        changed(name, "tokenizer_config.json", lambda config, template=template: config | {"chat_template": template})
    changed("t_list", "tokenizer_config.json", lambda config: [])
    changed(
        "t_ids", "tokenizer.json", lambda t: t | {"model": t["model"] | {"vocab": t["model"]["vocab"] | {"a": 500}}}
    )
    (_model(folder, "t_garbage") / "tokenizer.json").write_text("{{{")
    for file in _model(folder, "notokenizer").glob("tokenizer*"):
        file.unlink()


if __name__ == "__main__":
    cases, results = map(Path, sys.argv[1:])
    make_settings(Path())
    make_loaded(Path())
    program._GRACE_SECONDS = 0.0
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    done = []
    for case in json.loads(cases.read_text()):
        signal.alarm(60)
        done.append(asdict(run_case(*case)))
        signal.alarm(0)
    results.write_text(json.dumps(done))
