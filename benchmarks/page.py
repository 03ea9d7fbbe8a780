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
    """Peer's wall time over ours per number of threads, and our share of the peer's extra peak memory."""
    cases: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in content["rows"]:
        cases.setdefault((row["part"], row["peer"]), {})[row["threads"]] = row
    lines = [f"Measured: {told(content['machine'])}.", "", HEADER, RULE]
    for (part, peer), by_threads in cases.items():
        first = next(iter(by_threads.values()))
        asked = "" if first["at_least"] is None else f"{first['at_least']:g}x"
        if any(row["misses"] for row in by_threads.values()):
            asked += ", missed"
        ratios = [f"{by_threads[n]['wall_ratio']:.2f}x" if n in by_threads else "" for n in (1, 2)]
        share = first["memory_share"]
        memory = "" if share is None else f"{share:.2f}x"
        lines.append(f"| {part} | {peer} | {asked} | {ratios[0]} | {ratios[1]} | {memory} |")
    return "\n".join(lines)


if __name__ == "__main__":
    *figures, page = map(Path, sys.argv[1:])
    contents = [json.loads(path.read_text()) for path in figures]
    rows = [row for content in contents for row in content["rows"]]
    renew(page, "bench", markdown({"machine": contents[0]["machine"], "rows": rows}))
