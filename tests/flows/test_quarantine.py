"""`tidegate quarantine`: list from storage, release through the living manager, or on purpose without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.cli import main
from storage.local import LocalStore
from storage.verify import verify
from tests.rollout.building import RUN, Bench


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    """A run on files whose group 0 is quarantined."""
    bench = Bench(store=LocalStore(tmp_path), max_attempts=1)
    for dispatch in bench.control.take("w", 100):
        if dispatch.identity.group == 0:
            bench.fail(dispatch)
    bench.flush()
    return tmp_path


def call(folder: Path, *arguments: str) -> int:
    return main(["quarantine", *arguments, "--storage", str(folder)])


def test_the_list_names_group_reason_and_attempts(poisoned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(poisoned, "list", RUN, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found == [{"group": 0, "reason": "1 failed attempts, 0 lost processes", "attempts": [1, 1]}]
    assert call(poisoned, "list", RUN) == 0
    assert "1 failed attempts" in capsys.readouterr().out


def test_a_release_without_a_living_manager_is_refused_and_says_how(
    poisoned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(poisoned, "release", RUN, "0") == 2
    said = capsys.readouterr().err
    assert "no living manager" in said
    assert "--claim" in said
    assert call(poisoned, "list", RUN, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)) == 1


def test_a_release_by_a_claim_gives_the_group_back(poisoned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(poisoned, "release", RUN, "0", "--claim") == 0
    capsys.readouterr()
    assert call(poisoned, "list", RUN, "--json") == 0
    assert json.loads(capsys.readouterr().out) == []
    report = verify(LocalStore(poisoned), RUN)
    assert report.sound, report.problems
    bench = Bench(store=LocalStore(poisoned), created=True)
    assert [d.identity.attempt for d in bench.control.take("w", 100) if d.identity.group == 0] == [1, 1]


@pytest.mark.parametrize("groups", [["7"], ["0", "7"], ["all-of-them"]])
def test_groups_that_are_not_quarantined_are_the_users_mistake_and_nothing_is_written(
    poisoned: Path, groups: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in poisoned.rglob("*"))
    try:
        code = call(poisoned, "release", RUN, *groups, "--claim")
    except SystemExit as ended:  # argparse's own refusal
        code = int(ended.code or 0)
    assert code == 2
    assert sorted(path.name for path in poisoned.rglob("*")) == before
    assert "Traceback" not in capsys.readouterr().err
