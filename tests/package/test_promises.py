"""docs/reliability.md names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "reliability.md"


def test_every_promise_names_a_test_that_exists():
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 20
    for file, test in named:
        text = (TESTS / file).read_text(encoding="utf-8")
        assert f"def {test}(" in text if test else "def test_" in text, (file, test)
