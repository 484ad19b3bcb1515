"""`tidegate hosts`: list what is owed from storage, and say that a process is gone, on purpose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.cli import main
from storage.local import LocalStore
from storage.verify import verify
from tests.rollout.building import RUN, Bench
from tests.rollout.test_acknowledging import receipt, sealed


@pytest.fixture
def owing(tmp_path: Path) -> Path:
    """A run on files that owes two acknowledgements to one process of a host and one to another."""
    bench = Bench(store=LocalStore(tmp_path))
    sealed(bench, receipt("b1"), count=2)
    sealed(bench, receipt("b2"), count=1)
    bench.flush()
    return tmp_path


def call(folder: Path, *arguments: str) -> int:
    return main(["hosts", *arguments, "--storage", str(folder)])


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    capsys.readouterr()
    assert call(folder, "list", RUN, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_the_list_names_hosts_processes_and_how_much_they_wait_for(
    owing: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert listed(owing, capsys) == [
        {"host": "desk", "boot": "b1", "owed": 2}, {"host": "desk", "boot": "b2", "owed": 1}
    ]  # fmt: skip
    assert call(owing, "list", RUN) == 0
    assert "desk" in capsys.readouterr().out


def test_a_process_is_gone_only_when_somebody_claims_to_know(owing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(owing, "gone", RUN, "desk", "b1") == 2
    assert "--claim" in capsys.readouterr().err
    assert call(owing, "gone", RUN, "desk", "b1", "--claim", "--reason", "sold") == 0
    assert listed(owing, capsys) == [{"host": "desk", "boot": "b2", "owed": 1}]
    report = verify(LocalStore(owing), RUN)
    assert report.sound, report.problems
    assert (report.acknowledgements_owed, report.acknowledgements_expired) == (1, 2)


def test_a_process_that_is_owed_nothing_is_refused(owing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for host, boot in (("desk", "b3"), ("other", "b1")):
        assert call(owing, "gone", RUN, host, boot, "--claim") == 2
        assert "owes nothing" in capsys.readouterr().err
    assert len(listed(owing, capsys)) == 2
