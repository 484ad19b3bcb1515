"""The command line looks at a finished run: people get tables, programs get JSON, verify's exit code is its verdict."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from flows.cli import main
from storage.local import LocalStore
from storage.runs import RunPaths
from tests.faults.house import RUN, House, small

STEPS = 8
SUITE = {"name": "words", "environment": "reverse", "options": {"letters": 2}, "tasks": 3}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 16 groups in 8 steps, made by real parts in one process."""
    folder = tmp_path_factory.mktemp("finished")

    async def run() -> None:
        await House(folder, small(evaluation={"every": 4, "suites": [SUITE]})).run()

    asyncio.run(run())
    return folder


def look(finished: Path, *arguments: str) -> list[str]:
    command, *rest = arguments
    return [command, RUN, "--storage", str(finished), *rest]


def answer(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> dict[str, object]:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_verify_proves_a_sound_run(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(look(finished, "verify")) == 0
    assert capsys.readouterr().out.rstrip().endswith("SOUND")
    report = answer(capsys, look(finished, "verify"))
    assert (report["sound"], report["steps"], report["lost"], report["trained_twice"]) == (True, STEPS, 0, 0)
    assert report["consumed"] == report["handed_out"] == 16


def test_verify_of_an_altered_run_says_what_and_ends_with_1(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    path = max((copy / RunPaths(RUN).journal).glob("*.arrow"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    assert main(look(copy, "verify")) == 1
    said = capsys.readouterr().out
    assert "PROBLEM" in said
    assert said.rstrip().endswith("NOT SOUND")
    assert main(look(copy, "verify", "--json")) == 1
    assert json.loads(capsys.readouterr().out)["sound"] is False


def test_status_without_living_processes_shows_where_storage_stands(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = answer(capsys, look(finished, "status"))
    assert found["live"] is None
    assert found["storage"]["step"] == STEPS  # type: ignore[index]
    assert main(look(finished, "status")) == 0
    assert "no living manager" in capsys.readouterr().out


def test_inspect_shows_the_run_a_step_and_the_whole_history_of_a_group(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(capsys, look(finished, "inspect"))["step"] == STEPS
    step = answer(capsys, look(finished, "inspect", "--step", "2"))
    assert step["step"] == 2
    group = step["groups"][0]  # type: ignore[index]
    assert main(look(finished, "inspect", "--group", str(group))) == 0
    kinds = [json.loads(line)["kind"] for line in capsys.readouterr().out.splitlines()]
    assert kinds[0] == "group_reserved"
    assert {"groups_dispatched", "sealed", "group_completed", "lease_issued"} <= set(kinds)


def test_inspect_shows_every_evaluation(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(look(finished, "inspect", "--evaluations")) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["suite"], one["step"], one["samples"], one["failed"]) for one in found] == [
        ("words", 4, 3, 0),
        ("words", 8, 3, 0),
    ]
    assert answer(capsys, look(finished, "inspect"))["evaluations"] == {"done": 2, "due": []}


def test_inspecting_what_never_happened_is_the_users_mistake(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(look(finished, "inspect", "--step", "99")) == 2
    assert "no step 99" in capsys.readouterr().err
    assert main(look(finished, "inspect", "--group", "99")) == 2
    assert "no group 99" in capsys.readouterr().err


def test_diff_of_a_checkpoint_and_its_copy_on_another_storage_ends_with_0(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, tmp_path / "copy")
    arguments = ["diff", RUN, f"{RUN}@{STEPS}", "--storage", str(finished), "--right-storage", str(tmp_path / "copy")]
    found = answer(capsys, arguments)
    assert (found["equal"], found["bytes_read"], found["tensors"], found["fields"]) == (True, 0, [], {})
    assert main(arguments) == 0
    assert capsys.readouterr().out.rstrip().endswith("EQUAL")


def test_looking_changes_nothing(finished: Path) -> None:
    store = LocalStore(finished)
    before = {key: store.read(key) for key in store.list("runs")}
    main(["diff", RUN, f"{RUN}@3", "--storage", str(finished)])
    for command in ("verify", "status", "inspect"):
        main(look(finished, command))
    assert {key: store.read(key) for key in store.list("runs")} == before
