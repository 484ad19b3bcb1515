"""kill -9 at every write of a run: the process that holds the whole run dies right before, in the middle of, or right
after a chosen write, its successor dies once more while it recovers, and the third ends the run.

`TIDEGATE_BOUNDARIES` says how many of the boundaries are tried in each store (a few of each kind come first).
"""

from __future__ import annotations

import hashlib
import os
import random
import uuid
from pathlib import Path

import pytest

from flows.seaweed import S3Server
from storage import schema
from storage.errors import UnknownRun
from storage.filesystem import Store
from storage.history import read_all
from storage.journal import fold
from storage.local import LocalStore, leftover
from storage.opening import open_store
from storage.runs import open_run
from storage.verify import Report, verify
from tests.faults.dying import FINISHED, PHASES, RUN, Death, Heard, heard, play

WRITES = {"run.json": 1, "journal": 28, "payload": 4, "objects": 14, "checkpoints": 3, "ledger": 3}
"""What each run surely writes before it ends, of each kind."""
AT_ONCE = 8
"""Writes that may be under way together: two workers, the journal, the archivist, four shards."""
COUNT = int(os.environ.get("TIDEGATE_BOUNDARIES", "0"))


def boundaries(phases: tuple[str, ...], count: int) -> list[Death]:
    """The first `count` of all in an order that takes the kinds in turn."""
    dice = random.Random(7)
    turns: list[tuple[float, Death]] = []
    for kind, writes in WRITES.items():
        found = [Death(kind, at, phase) for at in range(writes) for phase in phases]
        dice.shuffle(found)
        turns += [(turn + dice.random(), death) for turn, death in enumerate(found)]
    return [death for _, death in sorted(turns, key=lambda turn: turn[0])][:count]


def survive(url: str, folder: Path, death: Death, environment: dict[str, str]) -> Report:
    """Die, die again while recovering, end; and what storage says after each."""
    store, said = open_store(url), folder / "said"
    again = Death("journal", random.Random(str(death)).randrange(1, 5), "after" if death.at % 2 else "before")
    step = 0
    for life, how in enumerate((death, again)):
        code = play(url, how, said, environment)
        known = heard(said)
        assert code == -9 or (life and code == FINISHED), said.with_suffix(".err").read_text()[-2000:]
        if not life:
            assert [key.split("/")[2] for key in known.died] == [death.kind]
        step = nothing_acknowledged_is_lost(store, known, step)
    assert play(url, None, said, environment) == FINISHED, said.with_suffix(".err").read_text()[-2000:]
    nothing_acknowledged_is_lost(store, heard(said), step)
    report = verify(store, RUN)
    assert report.sound, report.problems
    assert report.finished == "source exhausted"
    assert (report.handed_out, report.consumed, report.unsettled) == (12, 12, 0)
    assert (report.lost, report.trained_twice, report.steps_diverged) == (0, 0, 0)
    assert report.incarnations >= 2 or death.kind == "run.json"
    return report


def nothing_acknowledged_is_lost(store: Store, known: Heard, before: int) -> int:
    """Each object whose creation returned holds its bytes; each step that the driver was told of is committed. Returns
    the last one."""
    for key, digest in known.objects.items():
        assert hashlib.sha256(store.read(key)).hexdigest() == digest, key
    try:
        info = open_run(store, RUN)
    except UnknownRun:
        assert not known.objects
        return 0
    ledger, _ = fold(store, RUN, info.num_siblings)
    assert ledger.step >= max(known.step, before)
    there = {key for key in store.list(f"runs/{RUN}/journal") if key.endswith(".arrow")}
    unknown = there - known.objects.keys() - known.deleting
    assert len(unknown) <= len(known.died), "only what died in the middle of being written may be there unsaid"
    return ledger.step


@pytest.mark.parametrize("death", boundaries(PHASES, COUNT or 6), ids=str)
def test_a_run_survives_sigkill_at_any_write(death: Death, tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    survive(url, tmp_path, death, {})
    left = leftover(LocalStore(url), "runs")
    # Of a swap, and of any write where files cannot be nameless: the one that died, and those of other threads.
    assert len(left) <= AT_ONCE
    assert LocalStore(url).delete(left) == []
    assert verify(LocalStore(url), RUN).sound


@pytest.mark.slow
@pytest.mark.parametrize("death", boundaries(("before", "after"), COUNT or 2), ids=str)
def test_a_run_on_s3_survives_sigkill_at_any_write(death: Death, tmp_path: Path, seaweed: S3Server) -> None:
    survive(seaweed.url(f"b/{uuid.uuid4().hex[:8]}"), tmp_path, death, seaweed.environment)


def test_the_run_that_dies_writes_every_kind_of_object_and_most_kinds_of_record(tmp_path: Path) -> None:
    """The boundaries are those of a run that does everything."""
    url = str(tmp_path / "store")
    assert play(url, None, tmp_path / "said", {}) == FINISHED, (tmp_path / "said.err").read_text()[-2000:]
    store = open_store(url)
    written = [key.split("/")[2] for key in store.list(f"runs/{RUN}") if "/journal/" not in key]
    written += ["journal"] * len(list(read_all(store, RUN)))
    assert {kind: written.count(kind) >= least for kind, least in WRITES.items()} == dict.fromkeys(WRITES, True)
    kinds = {type(row.record) for segment in read_all(store, RUN) for row in segment.rows}
    elsewhere = {  # what needs a fault, a filter, a person or many checkpoints: tests/simulation kills managers there;
        # and what needs resources: test_turns.py and test_hosts.py kill everybody
        schema.ModelAnswered, schema.RequestIntent, schema.RequestResult, schema.ResourceExported,
        schema.ContinuationDiscarded, schema.AckDone, schema.ObligationExpired,
        schema.AttemptsMinted, schema.AttemptAbandoned, schema.GroupDiscarded, schema.GroupRequeued,
        schema.GroupQuarantined, schema.QuarantineReleased, schema.LeaseRolledBack, schema.StepRedone,
        schema.ConfigChanged, schema.Forked, schema.StepsReverted, schema.Retired, schema.Deleted,
    }  # fmt: skip
    assert set(schema.KINDS.values()) - kinds == elsewhere
