"""What mkdocs makes of the pages: it adds those of reference/, which come from the code and are stored nowhere.

A page that names one in code marks, such as `reference/settings`, gets a link to it. Links to files outside of docs/
become their paths, as a site has no such files.
"""

import contextlib
import inspect
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

import hybrid_grpo
from hybrid_grpo.__main__ import COMMANDS, main
from hybrid_grpo.commands import configs
from hybrid_grpo.config.commands import SftConfig
from hybrid_grpo.config.foreign_names import foreign_names
from hybrid_grpo.config.help import described, meaning_of
from hybrid_grpo.config.train import TrainConfig
from hybrid_grpo.config.types import fields_of
from hybrid_grpo.records.metrics.catalogue import CATALOGUE

ROOT = Path(__file__).parent.parent
CONFIGS = (
    *(TrainConfig, SftConfig, configs.EvaluateConfig, configs.PlanConfig, configs.GenerateConfig, configs.ChatConfig),
    *(configs.ScoreConfig, configs.PublishConfig, configs.WatchConfig),
)


def on_files(files: Any, config: Any) -> Any:
    for page in (settings, metrics, commands, python, names, architectures):
        content = "\n".join(page()) + "\n"
        files.append(File.generated(config, f"reference/{page.__name__}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    depth = page.file.src_uri.count("/") + 1

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        up = target.count("../")
        return match[0] if up < depth else f"{text} (`{target.replace('../', '')}`)"

    markdown = re.sub(r"\[([^\]]*)\]\(((?:\.\./)+[^)]*)\)", link, markdown)
    return re.sub(r"`reference/(\w+)`", rf"[\1]({'../' * (depth - 1)}reference/\1.md)", markdown)


def settings() -> Iterator[str]:
    """Every setting once, below its section, as the first of CONFIGS that has it explains it."""
    found: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {}
    for cls in CONFIGS:
        for section in fields_of(cls):
            _, rows = found.setdefault(section, (meaning_of(cls, section), {}))
            for name, kind, default, meaning in described(cls, section):
                rows.setdefault(name, (f"`{section}.{name}`", kind, default and f"`{default}`", meaning))
    yield "# Settings\n\nIn a recipe a section is a key, and on the command line `--section.name VALUE`."
    for section, (meaning, rows) in found.items():
        yield f"\n## {section}\n\n{cell(meaning)}\n"
        yield from table(["setting", "values", "default", "meaning"], rows.values()) if rows else ()


def metrics() -> Iterator[str]:
    yield "# Metrics\n\nThe numbers of a step in `metrics.jsonl`, and how those of all ranks become one."
    for stage in dict.fromkeys(metric.name.split("/")[0] for metric in CATALOGUE):
        yield f"\n## {stage}\n"
        rows = (
            (f"`{metric.name}`", metric.meaning, metric.unit, metric.reduction.replace("rank_", "rank "), metric.better)
            for metric in CATALOGUE
            if metric.name.split("/")[0] == stage
        )
        yield from table(["metric", "meaning", "unit", "over ranks", "better"], rows)


def commands() -> Iterator[str]:
    yield "# Commands\n\nWhat `hybrid-grpo COMMAND --help` shows; [settings](settings.md) has every section in full."
    for name in COMMANDS:
        with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
            main([name, "--help"])
        yield f"\n## {name}\n\n```text\n{shown.getvalue().rstrip()}\n```"


def python() -> Iterator[str]:
    yield "# Python\n\n`import hybrid_grpo as hg`; the page [Python](../python.md) has examples."
    for name in hybrid_grpo.__all__:
        thing = getattr(hybrid_grpo, name)
        yield from documented(f"\n## {name}", name, thing)
        for part, value in vars(thing).items() if inspect.isclass(thing) else ():
            if not part.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                yield from documented(f"\n### {name}.{part}", part, value)


def documented(heading: str, name: str, thing: Any) -> Iterator[str]:
    """Heading, signature and docstring, whose arguments become a list."""
    yield heading + "\n"
    if inspect.isfunction(thing):
        # Annotations are texts, as nothing evaluates them.
        yield f"```python\n{name}{str(inspect.signature(thing)).replace(chr(39), '')}\n```\n"
    text = (inspect.getdoc(thing) or "").replace("\nArgs:", "")
    yield re.sub(r"\n {4,}", " ", re.sub(r"\n    (\w+): ", r"\n- **`\1`**: ", text))


def names() -> Iterator[str]:
    yield "# Names of other frameworks\n\nTheir settings, and what `hybrid-grpo port` makes of them."
    for framework, theirs in foreign_names().items():
        yield f"\n## {framework}\n"
        yield from table(["there", "here"], ((f"`{name}`", ours) for name, ours in theirs.items()))


def architectures() -> Iterator[str]:
    yield (ROOT / "benchmarks/results/architectures.md").read_text().replace("../../docs/", "../")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    head = list(head)
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(map(cell, row))} |"


def cell(text: str) -> str:
    """The text on one line, in which what is not code has neither tags nor columns."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(p if p[:1] == "`" else p.replace("<", "&lt;").replace("|", "\\|") for p in parts)
