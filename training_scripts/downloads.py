"""Reads pip's report of a dry run (`pip install --dry-run --report -`) and prints which torch it would install, and how
large the downloads are. Prints nothing where pip gave no report.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen


def size(package: dict) -> float:
    """Bytes of a package's file; infinite where its server does not say."""
    try:
        with urlopen(Request(package["download_info"]["url"], method="HEAD"), timeout=10) as answer:
            return float(answer.headers["Content-Length"])
    except (OSError, TypeError, ValueError):
        return float("inf")


def main() -> None:
    report = sys.stdin.read()
    packages = json.loads(report)["install"] if report else []
    by_name = {package["metadata"]["name"].lower(): package for package in packages}
    if "torch" not in by_name:
        return
    build = "CUDA" if any(name.startswith(("nvidia-", "cuda-")) for name in by_name) else "CPU"
    with ThreadPoolExecutor(8) as pool:
        total = sum(pool.map(size, packages))
    large = "of unknown size" if total == float("inf") else f"of {total / 1e9:.1f} GB"
    version = by_name["torch"]["metadata"]["version"]
    print(f"torch {version}, a {build} build: {len(packages)} packages, downloads {large}")


main()
