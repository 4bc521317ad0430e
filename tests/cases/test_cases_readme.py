"""The table of cases is true: every test it names exists and says the case's number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

HERE: Final = Path(__file__).parent
ROWS: Final = re.findall(
    r"^\| (B\d+) \| ([^|]+) \| ([^|]+) \|$", (HERE / "README.md").read_text(), re.M
)


def test_every_case_has_one_row() -> None:
    """In order, each with a test, or a word on what it needs."""
    numbers = [int(case[1:]) for case, _, _ in ROWS]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 67
    for case, _, where in ROWS:
        assert "`" in where or "needs" in where, case


@pytest.mark.parametrize(("case", "where"), [(case, where) for case, _, where in ROWS])
def test_what_a_row_names_exists(case: str, where: str) -> None:
    """A test that was renamed takes its row along."""
    for file, name in re.findall(r"`([\w./]+)::(\w+)`", where):
        source = (HERE / file).resolve().read_text()
        assert re.search(rf"\bdef {name}\(", source), f"{case}: {file}::{name}"


def test_every_test_of_a_case_is_in_its_row() -> None:
    """Tests here that carry a number are found from the table."""
    named = {
        (case.lower(), name) for case, _, where in ROWS for name in re.findall(r"::(\w+)", where)
    }
    for path in HERE.glob("test_cases_*.py"):
        for name, case in re.findall(r"def (test_(b\d+)_\w+)\(", path.read_text()):
            assert (case, name) in named, f"{path.name}::{name} is missing in README.md"
