"""Names the packages for gpu_pack.sh, one `name==version` a line: transformers, TRL, and what setup.py and the parts of
gpu.sh require, with all that it requires, without what a machine with torch, triton and an older transformers has.

    python benchmarks/gpu_packages.py 3.12    # the version of Python there
"""

import sys
from collections.abc import Iterable
from importlib.metadata import distribution, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

THERE = "torch", "triton", "transformers"
LEFT_OUT = {"wandb"}
"""No part of gpu.sh logs to it."""
BESIDE = "pytest", "pytest-xdist", "hypothesis", "gguf", "bitsandbytes", "peft"
TRL = "trl==1.16.*"
"""As in trl_env.sh: it requires no more than this package does."""


def required(name: str, python: str) -> set[str]:
    """The packages that a package requires itself, for a version of Python."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    needed = [Requirement(line) for line in requires(name) or ()]
    return {canonicalize_name(r.name) for r in needed if r.marker is None or r.marker.evaluate(environment)}


def closure(names: Iterable[str], python: str, apart: set[str]) -> set[str]:
    """Packages and all that they require, without those in `apart` and what only these require."""
    found, left = set[str](), set(names) - apart
    while left:
        found |= left
        left = set().union(*(required(name, python) for name in left)) - found - apart
    return found


def main() -> None:
    python = sys.argv[1]
    own = required("hybrid-grpo", python)
    # What the package itself requires comes along, even if the transformers installed here requires it indirectly.
    certain = {*THERE}.union(*(required(name, python) for name in THERE))
    there = closure(THERE, python, own - certain)
    missing = closure({*own, *BESIDE}, python, there | LEFT_OUT)
    # Machines have an older one: images with torch 2.11 came with 5.17.
    missing.add("transformers")
    print("\n".join(f"{name}=={distribution(name).version}" for name in sorted(missing)), TRL, sep="\n")


if __name__ == "__main__":
    main()
