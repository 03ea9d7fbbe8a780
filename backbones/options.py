"""What a family refuses when it is built: each raises ValueError with one sentence that names the option."""

import math


def check_positive(name: str, **options: float) -> None:
    """All must be above 0, and finite."""
    for option, value in options.items():
        if not 0 < value < math.inf:  # so written, it refuses nan too
            raise ValueError(f"{option} of {name} must be above 0, not {value}")


def check_not_negative(name: str, **options: float) -> None:
    """All must be 0 or more, and finite."""
    for option, value in options.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{option} of {name} must be 0 or more, not {value}")


def check_drop_path(name: str, drop_path: float) -> None:
    """A probability below 1."""
    if not 0 <= drop_path < 1:
        raise ValueError(f"drop_path of {name} must be from 0 to below 1, not {drop_path}")


def check_unread(name: str, reason: str, **options: tuple[object, object]) -> None:
    """Options that nothing reads, as pairs of value and default, must keep their default."""
    for option, (value, default) in options.items():
        if value != default:
            raise ValueError(f"{option}={value} of {name} would do nothing {reason}; leave it out")


def check_choice(name: str, option: str, value: str | int, choices: tuple[str | int, ...]) -> None:
    """One of a few."""
    if value not in choices:
        *most, last = choices
        known = f"{', '.join(map(str, most))} or {last}" if most else str(last)
        raise ValueError(f"{option} of {name} must be {known}, not {value!r}")


def check_width(name: str, embed_dim: int, num_heads: int, mlp_ratio: float) -> None:
    """Heads of equal width, and a feed-forward network of at least one unit."""
    if embed_dim % num_heads:
        raise ValueError(f"embed_dim={embed_dim} of {name} is not a multiple of num_heads={num_heads}")
    if int(embed_dim * mlp_ratio) < 1:
        raise ValueError(f"mlp_ratio={mlp_ratio} of {name} leaves no hidden unit")
