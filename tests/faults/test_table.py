"""The table of faults in README.md names tests that exist, and every test of this folder."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
TABLE = (HERE / "README.md").read_text()
NAMED = re.findall(r"`((?:\w+/)+\w+\.py)(?:::(\w+))?`", TABLE)
FILES = ["test_boundaries.py", "test_deaths.py", "test_requests.py", "test_partition.py", "test_disk.py",
         "test_damaged_objects.py", "test_listing_and_clocks.py"]  # fmt: skip
"""Whose every test is in the table."""


def _tests_in(path: Path) -> set[str]:
    found = ast.walk(ast.parse(path.read_text()))
    functions = [one for one in found if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {one.name for one in functions if one.name.startswith("test_")}


def test_every_test_that_is_named_exists() -> None:
    assert len(NAMED) > 60
    for file, name in NAMED:
        found = _tests_in(HERE.parent / file)
        assert name in found if name else found, f"{file}::{name}"


def test_every_test_of_a_fault_is_named() -> None:
    for file in FILES:
        named = {name for where, name in NAMED if where == f"faults/{file}"}
        assert _tests_in(HERE / file) - named == set(), file


def test_every_fault_says_something_of_both_stores() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    assert len(rows) > 40
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 3, row
        assert all(cells), row
