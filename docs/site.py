"""What mkdocs does to pages: links to files outside of docs/ become their paths, as a site has no such files."""

import re
from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    depth = page.file.src_uri.count("/") + 1

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        up = target.count("../")
        return match[0] if up < depth else f"{text} (`{target.replace('../', '')}`)"

    return re.sub(r"\[([^\]]*)\]\(((?:\.\./)+[^)]*)\)", link, markdown)
