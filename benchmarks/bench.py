"""Every comparison with a peer as one table, and as JSON: what `make bench` runs.

    python benchmarks/bench.py [--only views knn] [--threads 1 2] [--quick] [--json FILE] [--device cuda]

Each part is a script of its own with the same options.
"""

import importlib

from side_by_side import measured, parser

PARTS = (
    *("multicrop_loss", "last_layer", "views", "worker_share", "backbones", "swin", "optimizer"),
    *("switches", "prefetching", "compiling", "whole_step", "knn"),
)


def main() -> None:
    """Run the parts asked for, in their order."""
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    chosen = options.parse_args()
    measured({name: importlib.import_module(name).cases for name in chosen.only}, chosen)


if __name__ == "__main__":
    main()
