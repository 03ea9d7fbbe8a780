"""The table of a `make bench` as Markdown, in place of the one in a page of docs.

python benchmarks/page.py bench.json docs/performance.md
"""

import json
import sys
from pathlib import Path
from typing import Any

from side_by_side import told

from nestling.ssl.pages import renew

HEADER = "| part | compared with | asked | 1 thread | 2 threads | memory |"
RULE = "| --- | --- | ---: | ---: | ---: | ---: |"


def markdown(content: dict[str, Any]) -> str:
    """Peer's wall time over ours per number of threads, and our share of the peer's tensors at the peak."""
    cases: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in content["rows"]:
        cases.setdefault((row["part"], row["peer"]), {})[row["threads"]] = row
    lines = [f"Measured: {told(content['machine'])}.", "", HEADER, RULE]
    for (part, peer), by_threads in cases.items():
        first = next(iter(by_threads.values()))
        ratios = {threads: row["wall_ratio"] for threads, row in by_threads.items()}
        asked = "" if first["at_least"] is None else f"{first['at_least']:g}x"
        asked += ", missed" if asked and min(ratios.values()) < first["at_least"] else ""
        told_ratios = " | ".join(f"{ratios[n]:.2f}x" if n in ratios else "" for n in (1, 2))
        lines.append(f"| {part} | {peer} | {asked} | {told_ratios} | {memory_cell(first)} |")
    return "\n".join(lines)


def memory_cell(row: dict[str, Any]) -> str:
    """The share, and what was asked where it is more."""
    share, most = row["memory_share"], row["most_memory"]
    if share is None:
        return ""
    return f"{share:.2f}x" + (f", {most:.2f}x asked" if share > most else "")


if __name__ == "__main__":
    *figures, page = map(Path, sys.argv[1:])
    contents = [json.loads(path.read_text()) for path in figures]
    rows = [row for content in contents for row in content["rows"]]
    renew(page, "bench", markdown({"machine": contents[0]["machine"], "rows": rows}))
