"""Every command and every Python line of README.md, docs/ and examples/ is run, in a copy of the repository.

A block of commands that needs a GPU or a hub says so in a comment above it: `<!-- needs a GPU -->`. Training commands
are shortened to a step or two; nothing else about them is changed.
"""

import html
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import forks
import pytest
from paths import ROOT
from warm_python import programs

from hybrid_grpo.config import TrainConfig
from hybrid_grpo.config.composition import setting_names
from hybrid_grpo.records.metrics.catalogue import CATALOGUE
from hybrid_grpo.run.local_ranks import free_port

pytestmark = pytest.mark.process

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples/README.md", *sorted(ROOT.glob("docs/**/*.md"))]
NEEDS = re.compile(r"<!-- needs a (GPU|hub) -->")
SHORT = "--run.steps 2 --policy.dtype float32 --rollout.max_completion_tokens 8 --rollout.prompts_per_step 8"
SHORT_EVALUATION = "--data.eval_limit 32"
ENVIRONMENT = {"WANDB_MODE": "disabled", "REWARD_TOKEN": "secret"}
PLACEHOLDERS = {
    " MODEL ": " runs/letters-task/model ",
    " DATA.jsonl ": " runs/letters-task/train.jsonl ",
}
"""What a reader fills in."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    needs: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    found = []
    lines = page.read_text(encoding="utf-8").splitlines()
    fences = [number for number, line in enumerate(lines) if line.startswith("```")]
    for start, end in zip(fences[::2], fences[1::2], strict=True):
        above = next((line for line in reversed(lines[:start]) if line.strip()), "")
        needs = NEEDS.fullmatch(above.strip())
        text = "\n".join(lines[start + 1 : end]) + "\n"
        found.append(Block(page, start + 2, lines[start][3:].strip(), text, needs[1] if needs else None))
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMANDS = [block for block in BLOCKS if block.language in ("bash", "sh", "console") and block.needs is None]
PYTHON = [block for block in BLOCKS if block.language == "python" and block.needs is None]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, with what the quickstart leaves behind and the files that readers are told to write."""
    folder = tmp_path_factory.mktemp("docs") / "hybrid_grpo"
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split("\n")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    warm_ups = (f"training_scripts/{name}_sft.yaml" for name in ("letters", "pictures"))
    for name in (*warm_ups, "examples/from_python.py"):
        (folder / name).write_text(of_two_steps((ROOT / name).read_text()))
    shell(f"bash training_scripts/quickstart.sh --toy {SHORT} {SHORT_EVALUATION}", folder)
    shell("python training_scripts/lookup_task.py runs/chat && ln -s letters runs/quickstart", folder)
    assert len((folder / "runs/letters-sft/metrics.jsonl").read_text().splitlines()) == 2
    for block in PYTHON:
        first = re.match(r"# (\w+\.py)\n", block.text)
        if first:
            (folder / first[1]).write_text(block.text)
    (folder / "recipe.yaml").write_text((folder / "examples/tiny.yaml").read_text() + "data: {task: letters}\n")
    (folder / "answers.jsonl").write_text('{"prompt": "dcab=", "completion": "abcd", "answer": "abcd"}\n')
    return folder


def run(command: str, folder: Path) -> str:
    """Run a line of a page as a reader would, who has the environment already; what it writes to standard output.

    A program in Python, alone on its line, is spared the imports.
    """
    program = re.fullmatch(r"(hybrid-grpo|python) ([^|<>]*?)(?: > (\S+))?", command)
    if not program:
        return shell(command, folder)
    words = ["-m", "hybrid_grpo"] * (program[1] == "hybrid-grpo") + shlex.split(program[2])
    done = forks.run(*words, cwd=folder, environment=ENVIRONMENT, timeout=300)
    assert done.status == 0, f"{command}\n{done.out[-1500:]}\n{done.err[-3000:]}"
    if program[3]:
        (folder / program[3]).write_text(done.out)
    return done.out


def shell(command: str, folder: Path) -> str:
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PATH": f"{programs()}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
        "SKIP_SETUP": "1",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        # One rank is cheaper; with two, which are the default, tests/run/stopping/test_stopping.py runs a recipe.
        "LAUNCHER": f"--num_accelerators 1 --master_port {free_port()}",
    }
    environment.pop("RANK", None)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    return done.stdout


def shortened(command: str) -> str:
    """The command with a reader's own names filled in, and a training run cut short."""
    for name, value in PLACEHOLDERS.items():
        command = f" {command} ".replace(name, value).strip()
    command = command.replace("PORT", free_port())
    trains = re.search(r"hybrid[_-]grpo train|(quickstart|pictures)\.sh", command)
    if re.search(r"hybrid[_-]grpo sft", command):
        return f"{command} --run.steps 2"
    evaluation = f" {SHORT_EVALUATION}" if "--data.eval_path" in command else ""
    return f"{command} {SHORT}{evaluation}" if trains else command


def of_two_steps(text: str) -> str:
    """A recipe, or a program in Python, with its runs cut short."""
    short, count = re.subn(r'(\bsteps"?: )\d+', r"\g<1>2", text)
    assert count, text
    return short


def commands(block: Block) -> list[str]:
    """The commands of a block, continued lines joined, comments left out."""
    joined = block.text.replace("\\\n", " ")
    return [line for line in (re.sub(r"\s+#.*$", "", line).strip() for line in joined.splitlines()) if line]


def serve(command: str, folder: Path) -> None:
    """Start a server, wait until it says that it listens, and end it as its page says."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [programs() / "hybrid-grpo", *shlex.split(command)[1:]],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert server.stdout is not None
    said = ""
    while "http" not in said:
        line = server.stdout.readline()
        assert line, f"{command}\n{said}"
        said += line
    server.send_signal(signal.SIGTERM)
    assert server.wait(30) == 0


def test_every_block_of_commands_is_run_or_says_what_it_needs() -> None:
    assert {block.language for block in BLOCKS} <= {"bash", "python", "yaml", "json", ""}
    assert [
        str(b) for b in BLOCKS if b.language == "" and re.search(r"^(bash|hybrid-grpo|python) ", b.text, re.M)
    ] == []


def headings(page: Path) -> set[str]:
    """The anchors of a page."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "benchmarks/results.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for file, anchor in re.findall(r"\]\((?!https?:)([^)\s#]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
        target = page.parent / file if file else page
        assert target.exists() and (not anchor or anchor in headings(target)), f"{file}#{anchor}"


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_commands(block: Block, clone: Path) -> None:
    for command in commands(block):
        if command == "bash tests/run.sh" or command.startswith("bash tests/run.sh "):
            assert command.split()[1] in (ROOT / ".ci/run").read_text(), "CI runs this"
        elif command.startswith(("pip install", "DS_BUILD_OPS=0 DS_IGNORE_CUDA_DETECTION=1 pip install")):
            continue  # see test_the_package_installs_with_its_files
        elif command.startswith("hybrid-grpo watch"):
            serve(shortened(command), clone)
        elif command.removesuffix(" --toy") != "bash training_scripts/quickstart.sh":  # the fixture has run the toy
            run(shortened(command), clone)


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python(block: Block, clone: Path) -> None:
    if "hg." in block.text:
        shutil.rmtree(clone / "runs/vowels", ignore_errors=True)
        text = block.text.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "runs/chat/model")
        (clone / "page.py").write_text(of_two_steps(text) if '"steps"' in text else text)
        assert "runs/" in run("python page.py", clone) or "print" not in block.text
        return
    score = "def score(line):\n    return float(len(line))\n\n\n"
    before = "\n".join(b.text for b in PYTHON if b.page == block.page and b.line < block.line and "hg." not in b.text)
    sys.path.insert(0, str(clone))
    try:
        exec(compile(score + before + block.text, str(block), "exec"), {"__name__": "page"})
    finally:
        sys.path.remove(str(clone))


def test_the_pages_are_a_site_without_a_warning(tmp_path: Path) -> None:
    """A link to a page or a heading that is not there is a warning too."""
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "search/search_index.json").stat().st_size > 100_000
    made = {"settings": {*setting_names(TrainConfig)} - {"features", "rewards"}, "metrics": [m.name for m in CATALOGUE]}
    for page, names in made.items():
        text = html.unescape((tmp_path / f"reference/{page}/index.html").read_text())
        assert not [name for name in names if f"<code>{name}</code>" not in text]


def test_paragraphs_are_short() -> None:
    for page in {*ROOT.glob("docs/**/*.md")} - {ROOT / "docs/log.md", ROOT / "docs/measured.md"}:
        parts = re.split(r"(?ms)^```.*?^```|\n\s*\n|\n(?=\s*(?:- |\d+\. |\|))", page.read_text(encoding="utf-8"))
        assert max(len(part.split()) for part in parts if not part.startswith("|")) <= 90, page


def test_the_files_of_a_run_are_on_their_page(clone: Path) -> None:
    page = (ROOT / "docs/run-folder.md").read_text(encoding="utf-8")
    files = [file.name for run in clone.glob("runs/*/metrics.jsonl") for file in run.parent.iterdir()]
    assert len(files) > 20 and not [name for name in files if f"`{name}" not in page]


def test_the_package_installs_with_its_files(tmp_path: Path) -> None:
    """What `pip install` copies is all that the package opens at run time: recipes, kernels in C, the report's page."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "hybrid_grpo", source / "hybrid_grpo", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(tmp_path / "site"), str(source)], check=True, capture_output=True)
    here, there = ROOT / "hybrid_grpo", tmp_path / "site" / "hybrid_grpo"
    files = {str(p.relative_to(here)) for p in here.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert files - {str(p.relative_to(there)) for p in there.rglob("*")} == set()
