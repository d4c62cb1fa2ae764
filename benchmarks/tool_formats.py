"""Readers of tool calls on 100,000 random and corrupted turns for each format: none may raise, take long, or return
something unusable.

    python benchmarks/tool_formats.py [--turns 100000] [--seed 1] [--formats hermes ...] [--json FILE]

Counts turns with calls, with faults and with neither, and the longest time of a turn. Ends with status 1 if a reader
raises, or takes more than 2 s of processor time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from fuzzed_turns import fuzzed
from written_calls import SCHEMAS

from hybrid_grpo.turns.formats import FORMATS
from hybrid_grpo.turns.reading import format_reader

LONGEST_S = 2.0


def read_all(name: str, turns: int, seed: int) -> dict[str, Any]:
    """The outcomes of `turns` turns in a format."""
    reader = format_reader(FORMATS[name], SCHEMAS, 16, "")
    counts: Counter[str] = Counter()
    longest_s = 0.0
    for text in fuzzed(name, turns, seed):
        start_s = time.process_time()
        try:
            turn = reader(text, "")
            said = [turn.content, [[call.name, call.arguments, call.id] for call in turn.calls], turn.fault]
            json.dumps(said[1:], ensure_ascii=False, allow_nan=False).encode()
        except Exception as error:
            counts["raised"] += 1
            print(f"{name}: {type(error).__name__} for {text[:200]!r}", flush=True)
            continue
        longest_s = max(longest_s, time.process_time() - start_s)
        counts["calls"] += bool(turn.calls)
        counts["faults"] += turn.fault is not None
        counts["neither"] += not turn.calls and turn.fault is None
    kinds = {kind: counts[kind] for kind in ("raised", "calls", "faults", "neither")}
    return {"turns": turns, **kinds, "longest_s": round(longest_s, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--formats", nargs="+", choices=[*FORMATS], default=[*FORMATS])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {}
    for name in args.formats:
        results[name] = read_all(name, args.turns, args.seed)
        print(f"{name}: {json.dumps(results[name])}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    bad = [name for name, found in results.items() if found["raised"] or found["longest_s"] > LONGEST_S]
    sys.exit(f"wrong: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()
