"""`tidegate diff`: a table for people, JSON for programs, and the exit codes of diff."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.cli import main
from flows.diff import SHOWN
from storage.local import LocalStore
from storage.runs import RunPaths
from tests.storage.published_runs import Publisher, floats


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 3 and 6."""
    run = Publisher(LocalStore(tmp_path))
    run.publish(3, {"w": floats(1, 2), "bias": floats(0), "old": floats(1)}, updates=3)
    run.publish(6, {"w": floats(1, 2.5), "bias": floats(0)}, updates=6)
    return tmp_path


def diff(folder: Path, *arguments: str) -> int:
    return main(["diff", *arguments, "--storage", str(folder)])


def test_programs_get_every_difference(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(trained, "r@3", "r", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["equal"], found["left"]["step"], found["right"]["step"], found["num_equal"]) == (False, 3, 6, 1)
    assert found["fields"] == {"meta.updates": [3, 6]}
    assert found["tensors"] == [
        {"name": "old", "kind": "gone", "left": "F32 [1]", "right": ""},
        {"name": "w", "kind": "changed", "left": "F32 [2]", "right": "F32 [2]", "elements": 2, "changed": 1,
         "share": 0.5, "max_abs": 0.5, "max_rel": 0.2, "l2": 0.5, "not_finite": 0},
    ]  # fmt: skip
    assert found["bytes_read"] == found["bytes_left"] + found["bytes_right"] > 0


def test_people_get_a_table(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(trained, "r@3", "r") == 1
    said = capsys.readouterr().out
    for part in ("- r@3", "+ r@6", "meta.updates", "old", "gone", "50.00%", "0.2", "2 different, 1 equal"):
        assert part in said, said
    assert said.rstrip().endswith("DIFFERENT")
    assert diff(trained, "r", "r@6") == 0
    assert capsys.readouterr().out.rstrip().endswith("EQUAL")


def test_the_table_shows_those_that_changed_most_and_counts_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Publisher(LocalStore(tmp_path))
    names = range(SHOWN + 5)
    run.publish(1, {f"w{i:03}": floats(1) for i in names})
    run.publish(2, {f"w{i:03}": floats(1 + i + 1) for i in names})
    assert diff(tmp_path, "r@1", "r") == 1
    said = capsys.readouterr().out
    assert "w004" not in said
    assert "w005" in said
    assert "and 5 tensors more" in said


@pytest.mark.parametrize(
    ("right", "mention"),
    [("nobody", "no run 'nobody'"), ("r@99", "one of step 99"), ("r@x", "RUN@STEP"), ("r@", "RUN@STEP")],
)
def test_what_is_not_there_is_the_users_mistake(
    right: str, mention: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff(trained, "r", right) == 2
    said = capsys.readouterr().err
    assert mention in said
    for part in ("found:", "expected:", "do:"):
        assert part in said


def test_a_damaged_run_does_not_end_like_a_difference(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (trained / RunPaths("r").segment(1)).unlink()
    assert diff(trained, "r", "r@3") == 2
    assert "ArtifactCorrupt" in capsys.readouterr().err
