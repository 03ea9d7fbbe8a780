"""Parts of a page of docs that are generated, between two marks that name them."""

import re
from pathlib import Path


def renewed(page: str, name: str, content: str) -> str:
    """A page with what stands between `<!-- NAME: begin … -->` and `<!-- NAME: end -->` replaced."""
    marked = re.compile(rf"(<!-- {name}: begin[^\n]*-->\n)(.*?)(<!-- {name}: end -->)", re.DOTALL)
    found = marked.findall(page)
    assert len(found) == 1, f"{len(found)} parts are marked {name}"
    return marked.sub(lambda match: f"{match[1]}\n{content.strip()}\n\n{match[3]}", page)


def renew(path: Path, name: str, content: str) -> None:
    """Replace the part of a file."""
    path.write_text(renewed(path.read_text(encoding="utf-8"), name, content), encoding="utf-8")
