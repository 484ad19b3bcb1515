"""What a person sees of a rollout that acts: in the history of its group, and in the summary of its run."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from flows.cli import main
from storage import schema
from storage.clock import VirtualClock
from storage.inspection import group_history, summary
from storage.journal import JournalWriter, claim, store_frozen
from storage.local import LocalStore
from storage.runs import create_run, make_run
from storage.schema import Record
from storage.transitions import apply
from tests.rollout.building import RUN
from tests.storage.test_ledger import BLOCK, POLICY, RESERVE, mint
from tests.storage.test_turns import ANSWER, DONE, EXPORT, GIVEN_UP, INTENT, LOST, TURN

ACTED: list[Record] = [
    POLICY, RESERVE, mint(), BLOCK, ANSWER, INTENT, DONE, msgspec.structs.replace(EXPORT, state=b"\xff"), TURN,
    msgspec.structs.replace(ANSWER, boundary=2, turn=1, start=5, row=1),
    msgspec.structs.replace(INTENT, boundary=2, revision=1),
]  # fmt: skip


def written(store: LocalStore, records: list[Record]) -> None:
    create_run(store, make_run(run=RUN, created=0.0, num_siblings=2, staleness=1, fingerprints={}, settings={}))
    claimed = claim(store, RUN, 2, owner="o", writer="w", reason="r", clock=VirtualClock())
    writer = JournalWriter(RUN, 1, "w", claimed.tail, VirtualClock())
    for record in records:
        apply(claimed.ledger, claimed.ledger.next_seq, record)
        writer.append(record, b"row" if isinstance(record, schema.PayloadStored) else None)
    store_frozen(store, RUN, 1, writer.freeze())


def test_the_history_of_a_group_tells_what_its_rollouts_asked_and_were_told(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    written(store, [*ACTED, LOST, GIVEN_UP])
    history = group_history(store, RUN, 0)
    assert [entry["kind"] for entry in history] == [
        "group_reserved", "attempts_minted", "model_answered", "request_intent", "request_result", "resource_exported",
        "turn_committed", "model_answered", "request_intent", "attempt_abandoned", "continuation_discarded",
    ]  # fmt: skip
    asked, told, exported, turn = history[3:7]
    assert (asked["boundary"], asked["cursor"], asked["resource"], asked["revision"]) == (0, 0, "box", 0)
    assert (told["reply"], told["revision"], turn["state"], turn["revisions"]) == ("done", 1, "state", {"box": 1})
    assert exported["state"] == "base64:/w=="
    assert history[-1]["reason"] == "because"
    assert {entry["kind"] for entry in group_history(store, RUN, 1)} == {"group_reserved"}


def test_the_summary_counts_what_a_resume_would_go_on_with(tmp_path: Path) -> None:
    acted, left = LocalStore(tmp_path / "acted"), LocalStore(tmp_path / "left")
    written(acted, ACTED)
    assert summary(acted, RUN)["continuations"] == {"rollouts": 1, "acting": 1, "open_requests": 1}
    written(left, [*ACTED, LOST, GIVEN_UP])
    assert summary(left, RUN)["continuations"] == {"rollouts": 0, "acting": 0, "open_requests": 0}


def test_inspect_prints_a_line_for_each_record_of_a_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(LocalStore(tmp_path), ACTED)
    assert main(["inspect", RUN, "--group", "0", "--storage", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["reply"] for line in lines if line["kind"] == "request_result"] == ["done"]
