"""What was loaded, and what was not."""

from dataclasses import dataclass, field

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """The keys of a backbone and of the file it was loaded from, side by side.

    `unexpected` are the file's tensors that are no part of the backbone (heads, buffers) and were left
    out; `misshapen` maps a key to the file's shape and the backbone's.
    """

    layout: str
    network: str | None
    matched: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    misshapen: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{len(self.matched)} tensors loaded from {self.layout}"]
        if self.network:
            lines[0] += f", the {self.network}"
        lines += [f"missing: {shorten(self.missing)}"] * bool(self.missing)
        lines += [
            f"another shape: {key} is {found} in the file and {wanted} in the backbone"
            for key, (found, wanted) in self.misshapen.items()
        ]
        lines += [f"left out: {shorten(self.unexpected)}"] * bool(self.unexpected)
        return "\n".join([*lines, *self.notes])


def shorten(keys: tuple[str, ...] | list[str], limit: int = 6) -> str:
    """The first few keys, and how many more there are."""
    more = f" and {len(keys) - limit} more" if len(keys) > limit else ""
    return ", ".join(keys[:limit]) + more
