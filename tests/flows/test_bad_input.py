"""What a user can mend is one clear typed error and exit code 2; nothing is started and nothing written."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import msgspec
import pytest

from flows import demo
from flows.cli import main
from flows.config import RunConfig
from gpu.prepare import prepare_run
from storage.clock import SystemClock
from storage.local import LocalStore
from storage.runs import RunPaths

DEADLOCKS = {
    "P < batch + backoff": (["rollout.completed=39"], "39"),
    "R < P": (["rollout.retained=100"], "100"),
    "E < n": (["rollout.executing=15"], "15"),
    "eviction cap < batch": (["rollout.eviction_cap=31"], "31"),
    "bytes < one group": (["rollout.hot_bytes=1000"], "1000"),
    "staleness 0 with prefetch": (["rollout.staleness=0", "rollout.prefetch=4"], "prefetch"),
    "no checkpoint before training stops": (["checkpoint.every=20", "checkpoint.max_unsaved=10"], "10"),
    "some capacities, not all": (["rollout.retained=null"], "retained (R) = null"),
    "training without receipts": (
        ["rollout.executing=null", "rollout.completed=null", "rollout.retained=null"],
        "receipt",
    ),
    "evaluation without a suite": (["evaluation.every=5"], "evaluation.suites"),
    "a suite's task above the share of E": (
        ["rollout.executing=32", 'evaluation.suites=[{"name": "s", "environment": "reverse", "samples": 17}]'],
        "17 of executing (E) = 32, of which evaluations have 16",
    ),
    "updates under open calls": (["generation.in_flight_updates=false", 'drain.mode="none"'], "drain.mode"),
}
REFUSED = {
    "unknown field": (["rollout.sibling=3"], "sibling"),
    "not positive": (["rollout.batch=0"], "batch"),
    "section that is no section": (["rollout=3"], "rollout"),
    "path through a value": (["seed.x=3"], "seed"),
    "unknown environment": (['environment.name="chess"'], "chess"),
    "unknown option": (["environment.options.size=3"], "size"),
    "suites of one name": (
        ['evaluation.suites=[{"name": "s", "environment": "reverse"}, {"name": "s", "environment": "guess"}]'],
        "'s', 's'",
    ),
    "suite without a name": (['evaluation.suites=[{"environment": "reverse"}]'], "name"),
    "suite of an unknown environment": (['evaluation.suites=[{"name": "s", "environment": "chess"}]'], "chess"),
    "suite of more tasks than there are": (
        ['evaluation.suites=[{"name": "s", "environment": "reverse", "tasks": 65}]'],
        "65 tasks of environment 'reverse', which has 64",
    ),
    "unknown model": (['model.name="no/such/folder/here"'], "no/such/folder/here"),
    "longer than the model": (["generation.max_length=100000"], "100000"),
    "unknown storage": (['storage.url="ftp://host/x"'], "ftp"),
    "storage of one process": (['storage.url="memory://x"'], "one process"),
    "run name with a path": (['run="../x"'], "../x"),
}


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], *mentions: str) -> str:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    for part in ("found:", "expected:", "do:", *mentions):
        assert part in said, said
    assert "Traceback" not in said
    return said


def settings(*changes: str) -> list[str]:
    return [part for change in changes for part in ("--set", change)]


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default storage is a folder below the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", [*DEADLOCKS, *REFUSED])
def test_a_configuration_that_cannot_work_is_refused(
    case: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    changes, mention = {**DEADLOCKS, **REFUSED}[case]
    refused(["train", *settings(*changes)], capsys, mention)
    assert not list(tmp_path.iterdir()), "nothing may be written"


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"rollout": []}'])
def test_a_file_that_is_no_configuration_is_refused(
    text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text(text)
    refused(["train", "--config", "run.json"], capsys, "RunConfig")
    refused(["train", "--config", "absent.json"], capsys, "absent.json")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("command", ["resume", "status", "verify", "inspect"])
def test_a_run_that_does_not_exist_is_named_beside_those_that_do(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    refused([command, "nobody"], capsys, "nobody", "no run")
    assert not list(tmp_path.iterdir())
    made(RunConfig(run="somebody"))
    refused([command, "nobody"], capsys, "nobody", "somebody")


def made(config: RunConfig) -> LocalStore:
    """A new run on the configured storage."""
    assert config.run
    store = LocalStore(config.storage.url)
    prepare_run(store, config.spec(config.run), SystemClock())
    return store


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("seed=1", "model"),
        ("environment.options.letters=2", "environment"),
        ("environment.shuffle=false", "source"),
        ('environment.name="addition"', "environment"),
        ("rollout.siblings=8", "num_siblings"),
        ("rollout.staleness=1", "staleness"),
    ],
)
def test_going_on_with_data_of_another_meaning_is_refused(
    change: str, what: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made(RunConfig(run="r"))
    before = everything(tmp_path)
    refused(["train", *settings('run="r"', change)], capsys, f"{what} = ", "'r' was started with")
    refused(["resume", "r", *settings(change)], capsys, f"{what} = ")
    assert everything(tmp_path) == before


@pytest.mark.parametrize("command", ["resume", "status", "verify", "inspect"])
def test_a_run_of_an_unknown_schema_is_left_alone(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store = made(RunConfig(run="r"))
    path = tmp_path / ".tidegate/store" / RunPaths("r").info
    path.write_text(json.dumps({**json.loads(store.read(RunPaths("r").info)), "schema": 99}))
    before = everything(tmp_path)
    refused([command, "r"], capsys, "schema 99", "schema 1")
    assert everything(tmp_path) == before


@pytest.mark.parametrize("command", ["resume", "status", "verify", "inspect", "train"])
def test_storage_that_cannot_be_read_is_refused(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    arguments = (
        ["train", *settings('storage.url="file"', 'run="r"')]
        if command == "train"
        else [command, "r", "--storage", "file"]
    )
    refused(arguments, capsys, "permissions")
    assert everything(tmp_path) == {str(tmp_path / "file"): b"not a folder"}


def test_a_port_in_use_is_refused_before_anything_is_started(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept = tmp_path / "root/demo-tiny/store/result"
    kept.parent.mkdir(parents=True)
    kept.write_text("of the demo before")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert demo.main(["--model", "tiny", "--root", str(tmp_path / "root"), "--port", str(port)]) == 2
    said = capsys.readouterr().out
    assert f"port {port} is in use" in said
    assert "another port" in said
    assert everything(tmp_path) == {str(kept): b"of the demo before"}


def test_settings_survive_the_round_trip_through_the_form_and_the_run() -> None:
    config = RunConfig(run="r", seed=3)
    assert RunConfig.model_validate(json.loads(config.model_dump_json())) == config
    spec = config.spec("r")
    assert RunConfig.model_validate(msgspec.to_builtins(dict(spec.settings))) == config.resolved()
