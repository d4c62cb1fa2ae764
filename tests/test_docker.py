"""The Dockerfile, as far as that needs no Docker: it installs as setup.sh does, and copies files that are there."""

import re
import shlex

from paths import ROOT

TEXT = re.sub(r"^#.*\n", "", (ROOT / "docker/Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
STEPS = [(word, rest) for word, rest in (line.split(maxsplit=1) for line in TEXT.splitlines() if line)]


def installs(lines: list[str]) -> list[list[str]]:
    """What pip is told in lines of shell, without what may differ: options for logs and caches, and the extras."""
    told = []
    for line in lines:
        words = shlex.split(line.replace("${extras:+[$extras]}", "").replace("[lora,math]", ""))
        words = [word.replace("${TORCH_VERSION:-2.13.0}", "${TORCH_VERSION}") for word in words]
        told.append([word for word in words if word not in ("--quiet", "--no-cache-dir", "--editable")])
    return told


def test_the_image_installs_what_setup_sh_installs():
    script = (ROOT / "training_scripts/setup.sh").read_text().splitlines()
    here = installs([rest for word, rest in STEPS if word == "RUN" and " pip " in rest])
    assert here == installs(
        [line.strip().removesuffix(" || return") for line in script if "-m pip install --quiet" in line]
    )
    assert len(here) == 4 and here[2][:2] == ["DS_BUILD_OPS=0", "DS_IGNORE_CUDA_DETECTION=1"]
    assert [rest for word, rest in STEPS if word == "ARG"] == ["TORCH_VERSION=2.13.0", "TORCH_INDEX="]


def test_the_files_that_it_copies_are_there_and_reach_the_build():
    allowed = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    copied = {name for word, rest in STEPS if word == "COPY" for name in rest.split()[:-1]}
    assert copied == allowed and all((ROOT / name).exists() for name in copied)
