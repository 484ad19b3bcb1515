"""`tidegate fork` and `tidegate diff` on the command line: what is refused, with exit code 2 and nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from flows.cli import main
from flows.config import RunConfig
from storage.errors import StorageUnusable
from storage.filesystem import Bytes
from storage.local import LocalStore
from storage.runs import RunPaths, create_run, make_run, open_run
from storage.verify import verify
from tests.flows.test_bad_input import everything, refused
from tests.simulation.world import RUN
from tests.storage.editing import finished_run
from tests.storage.published_runs import Publisher, floats


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run with checkpoints of steps 1 and 3, whose description is one of a configuration."""
    store, held = LocalStore(tmp_path, fsync=False), finished_run()
    rollout = {"siblings": 2, "batch": 2, "staleness": 1, "executing": 8, "completed": 10, "retained": 10, "backoff": 2}
    config = RunConfig.model_validate({"run": RUN, "rollout": rollout, "storage": {"url": str(tmp_path)}})
    spec = config.spec(RUN)
    create_run(store, make_run(run=RUN, created=0.0, num_siblings=2, staleness=1, fingerprints=dict(spec.fingerprints),
                               settings=dict(spec.settings)))  # fmt: skip
    for key in held.list("runs"):
        if key != RunPaths(RUN).info:
            store.create(key, held.read(key))
    return tmp_path


def arguments(folder: Path, *more: str) -> list[str]:
    return ["fork", *more, "--storage", str(folder)]


def test_people_are_told_what_is_inherited_and_what_is_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(folder, f"{RUN}@1", "b", "--set", "training.learning_rate=0.5")) == 0
    said = capsys.readouterr().out
    url = LocalStore(folder).url
    for part in (
        f"b in {url} is a fork of {RUN}@1 in {url}", "after step 1, record 15 of the journal",
        "4 prompts handed out, of which 2 trained, 0 discarded, 0 quarantined; the other 2 start whole again",
        "5 later steps (2 to 6); their 10 prompts are trained again", "tidegate resume b",
    ):  # fmt: skip
        assert part in said, said
    info = open_run(LocalStore(folder), "b")
    training, storage = info.settings["training"], info.settings["storage"]
    assert isinstance(training, dict)
    assert isinstance(storage, dict)
    assert (info.settings["run"], training["learning_rate"], storage["url"]) == ("b", 0.5, url)
    assert main(["verify", "b", "--storage", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["forked_from"], report["inherited_consumed"]) == (f"{RUN}@1 in {url}", 2)
    assert main(["inspect", "b", "--storage", str(folder), "--group", "0", "--json"]) == 0
    assert [one["kind"] for one in json.loads(capsys.readouterr().out)] == ["forked"]


def test_last_good_of_a_whole_journal_says_that_nothing_is_lost(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(folder, RUN, "b", "--last-good")) == 0
    assert "nothing is lost" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "mentions"),
    [
        (["nobody", "b"], ["no run 'nobody'"]),
        ([f"{RUN}@2", "b"], ["steps: 1, 3", "one of step 2"]),
        ([f"{RUN}@x", "b"], ["RUN@STEP"]),
        ([RUN, RUN], ["a run of its own"]),
        ([RUN, "../b"], ["'../b'"]),
        ([RUN, "b", "--set", "environment.options.letters=2"], ["source = "]),
        ([RUN, "b", "--set", "environment.shuffle=false"], ["source = "]),
        ([RUN, "b", "--set", "environment.epochs=2"], ["source = "]),
        ([RUN, "b", "--set", "seed=1"], ["model = "]),
        ([RUN, "b", "--set", 'generation.dtype="bfloat16"'], ["generation.dtype = bfloat16"]),
        ([RUN, "b", "--set", "rollout.batch=0"], ["batch"]),
        ([RUN, "b", "--set", "rollout.completed=2"], ["max_completed >= 4"]),
        ([RUN, "b", "--to", "memory://x"], ["ends with this command"]),
        ([RUN, "b", "--to", "ftp://host/x"], ["ftp"]),
        ([RUN, "b", "--to", "s3://key:secret@bucket"], ["contains credentials"]),
    ],
)
def test_a_fork_that_cannot_be_is_the_users_mistake(
    given: list[str], mentions: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(folder)
    said = refused(arguments(folder, *given), capsys, *mentions)
    assert "secret" not in said
    assert everything(folder) == before


def test_an_existing_run_is_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(folder, RUN, "b")) == 0
    before = everything(folder)
    refused(arguments(folder, RUN, "b"), capsys, f"a complete fork of {RUN}@3", "tidegate resume b")
    assert everything(folder) == before


def test_an_unfinished_fork_cannot_be_resumed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(folder, RUN, "b")) == 0
    (folder / RunPaths("b").segment(0)).unlink()
    before = everything(folder)
    refused(["resume", "b", "--storage", str(folder)], capsys, f"tidegate fork {RUN}@3 b")
    assert everything(folder) == before
    assert main(["verify", "b", "--storage", str(folder)]) == 1
    assert main(arguments(folder, RUN, "b")) == 0
    assert verify(LocalStore(folder), "b").sound


def test_a_damaged_journal_is_left_on_request_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / RunPaths(RUN).segment(20)
    path.write_bytes(path.read_bytes()[:-40])
    before = everything(folder)
    refused(arguments(folder, RUN, "b"), capsys, "damaged at slot 20", f"tidegate fork {RUN} b --last-good")
    assert everything(folder) == before
    assert main(arguments(folder, RUN, "b", "--last-good", "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["damage"]["slot"], told["damage"]["segments_unreadable"]) == (20, 1)
    assert verify(LocalStore(folder), "b").sound


def test_diff_reads_a_store_that_takes_no_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Publisher(LocalStore(tmp_path))
    run.publish(3, {"w": floats(1, 2)})
    run.publish(6, {"w": floats(1, 2.5)})
    pinned: list[str] = []

    def read_only(self: LocalStore, key: str, data: Bytes) -> None:
        pinned.append(msgspec.json.decode(data)["manifest"])
        raise StorageUnusable(key, expected="a writer", action="none")

    monkeypatch.setattr(LocalStore, "create", read_only)
    assert main(["diff", "r@3", "r", "--storage", str(tmp_path)]) == 1
    assert [name[:9] for name in pinned] == ["000000003", "000000006"]


def test_diff_leaves_no_pin(tmp_path: Path) -> None:
    run = Publisher(LocalStore(tmp_path))
    run.publish(3, {"w": floats(1, 2)})
    before = everything(tmp_path)
    assert main(["diff", "r", "r", "--storage", str(tmp_path)]) == 0
    assert everything(tmp_path) == before
