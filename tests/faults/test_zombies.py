"""Two writers as real processes: racing claimants, a writer that is stopped while its slots are taken or retired."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.seaweed import S3Server
from storage import schema
from storage.clock import SystemClock
from storage.errors import RunFenced, SlotsRetired
from storage.filesystem import Bytes, Store
from storage.journal import JournalWriter, claim, fold, read_journal, store_frozen
from storage.local import LocalStore
from storage.low import raise_low, read_low, retire_slots
from storage.memory import MemoryStore
from storage.opening import open_store
from storage.runs import RunPaths, create_run, make_run
from storage.verify import verify
from tests.processes import wait_for

RUN = "zombies"
ROUNDS = int(os.environ.get("TIDEGATE_CLAIMS", "20"))
ROUNDS_OF_A_RUN = 10


@pytest.fixture(params=["local", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "store")
    else:
        server: S3Server = request.getfixturevalue("seaweed")
        yield server.url(f"z/{uuid.uuid4().hex[:8]}")


@pytest.fixture
def store(url: str) -> Store:
    one = open_store(url)
    create_run(one, make_run(run=RUN, created=0.0, num_siblings=1, staleness=None, fingerprints={}, settings={}))
    return one


def claims(store: Store, run: str = RUN) -> list[tuple[int, str]]:
    """(incarnation, writer) of every claim; the reading proves that there is no hole."""
    return [
        (row.record.incarnation, segment.header.writer)
        for segment in read_journal(store, run)
        for row in segment.rows
        if isinstance(row.record, schema.RunClaimed)
    ]


def write(store: Store, claimed: object, writer: str, count: int, run: str = RUN) -> JournalWriter:
    """Append `count` records, a segment each."""
    journal = JournalWriter(run, claimed.incarnation, writer, claimed.tail, SystemClock())  # type: ignore[attr-defined]
    for _ in range(count):
        journal.append(schema.ConfigChanged({"n": "1"}))
        frozen = journal.freeze()
        store_frozen(store, run, claimed.incarnation, frozen)  # type: ignore[attr-defined]
        journal.confirm(frozen)
    return journal


def take(store: Store, writer: str, run: str = RUN) -> object:
    return claim(store, run, 1, owner=writer, writer=writer, reason="test", clock=SystemClock())


# ---------------------------------------------------------------------- racing claimants


def test_of_two_simultaneous_claimants_each_gets_an_incarnation_of_its_own(store: Store) -> None:
    """Both go on to write: the one with the higher incarnation can, the other is fenced, and none fences itself."""
    dice = random.Random(ROUNDS)
    for first in range(0, ROUNDS, ROUNDS_OF_A_RUN):
        _race(store, f"race-{first}", range(first, min(ROUNDS, first + ROUNDS_OF_A_RUN)), dice)


def _race(store: Store, run: str, rounds: range, dice: random.Random) -> None:
    create_run(store, make_run(run=run, created=0.0, num_siblings=1, staleness=None, fingerprints={}, settings={}))
    for round_ in rounds:
        barrier = threading.Barrier(2)
        late = {f"r{round_}a": dice.uniform(0.0, 0.004), f"r{round_}b": dice.uniform(0.0, 0.004)}
        won: dict[str, object] = {}
        ended: dict[str, str] = {}

        def race(
            name: str, seconds: float, barrier: threading.Barrier = barrier, won: dict = won, ended: dict = ended
        ) -> None:
            barrier.wait()
            time.sleep(seconds)
            won[name] = take(store, name, run)
            try:
                write(store, won[name], name, 2, run)
                ended[name] = "wrote"
            except RunFenced:
                ended[name] = "fenced"

        names = list(late)
        threads = [threading.Thread(target=race, args=item) for item in late.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        by_incarnation = sorted(names, key=lambda name: won[name].incarnation)  # type: ignore[attr-defined]
        assert won[names[0]].incarnation != won[names[1]].incarnation  # type: ignore[attr-defined]
        assert ended[by_incarnation[1]] == "wrote", "the newest is never fenced"
    found = claims(store, run)
    assert [incarnation for incarnation, _ in found] == list(range(1, 2 * len(rounds) + 1))
    assert len({writer for _, writer in found}) == 2 * len(rounds)
    assert verify(store, run).sound


# ---------------------------------------------------------------------- a process that is stopped

WRITER = f"""
import json, sys, time
from storage import schema
from storage.clock import SystemClock
from storage.errors import TidegateError
from storage.journal import JournalWriter, claim, store_frozen
from storage.opening import open_store
store = open_store(sys.argv[1])
claimed = claim(store, {RUN!r}, 1, owner="zombie", writer="zombie", reason="test", clock=SystemClock())
journal = JournalWriter({RUN!r}, claimed.incarnation, "zombie", claimed.tail, SystemClock())
try:
    while True:
        journal.append(schema.ConfigChanged({{"n": "zombie"}}))
        frozen = journal.freeze()
        store_frozen(store, {RUN!r}, claimed.incarnation, frozen)
        journal.confirm(frozen)
        print(frozen.slot, flush=True)
        time.sleep(0.002)
except TidegateError as error:
    print(json.dumps([type(error).__name__, error.code]), flush=True)
    sys.exit(7)
"""


@pytest.mark.parametrize("retired", [False, True], ids=["claimed", "retired"])
def test_a_stopped_writer_whose_slots_were_taken_is_fenced_and_has_written_nothing_more(
    retired: bool, url: str, store: Store
) -> None:
    zombie = subprocess.Popen([sys.executable, "-c", WRITER, url], stdout=subprocess.PIPE, text=True)
    assert zombie.stdout is not None
    try:
        for _ in range(5):
            assert zombie.stdout.readline().strip().isdigit()
        zombie.send_signal(signal.SIGSTOP)
        claimed = take(store, "successor")
        journal = write(store, claimed, "successor", 30)
        if retired:
            first = claimed.tail.slot  # type: ignore[attr-defined]
            # The successor's claim lies at first - 1 and stays.
            assert retire_slots(store, RUN, range(first, journal.slot - 5), journal.slot - 5) == []
        before = {key: store.read(key) for key in store.list(RunPaths(RUN).journal)}
        zombie.send_signal(signal.SIGCONT)
        said = zombie.stdout.read().splitlines()
        assert zombie.wait(30) == 7
    finally:
        zombie.send_signal(signal.SIGCONT)
        zombie.kill()
        zombie.wait()
    assert json.loads(said[-1]) == ["RunFenced", "fenced"]
    assert {key: store.read(key) for key in store.list(RunPaths(RUN).journal)} == before
    if not retired:
        assert claims(store)[-1][1] == "successor"
        assert verify(store, RUN).sound


# ---------------------------------------------------------------------- low


class Sleeping(MemoryStore):
    """Lets somebody else act right before one create."""

    def __init__(self) -> None:
        super().__init__("sleeping")
        self.meanwhile: object = None

    def create(self, key: str, data: Bytes) -> None:
        if self.meanwhile is not None and key.endswith(".arrow"):
            act, self.meanwhile = self.meanwhile, None
            act()  # type: ignore[operator]
        super().create(key, data)


def test_a_claimant_that_sleeps_while_the_slot_it_wants_is_used_and_retired_does_not_believe_that_it_won() -> None:
    store = Sleeping()
    create_run(store, make_run(run=RUN, created=0.0, num_siblings=1, staleness=None, fingerprints={}, settings={}))
    first = take(store, "first")

    def meanwhile() -> None:
        journal = write(store, first, "first", 10)
        assert retire_slots(store, RUN, range(1, 8), 8) == []
        assert journal.slot == 11

    store.meanwhile = meanwhile
    with pytest.raises(SlotsRetired, match="begins at slot 8"):
        take(store, "sleeper")
    assert store.size(RunPaths(RUN).segment(11)) is None, "nothing was written at the journal's end"


def test_a_reader_that_finds_a_retired_slot_free_does_not_take_it_for_the_end(store: Store) -> None:
    write(store, take(store, "one"), "one", 6)
    retire_slots(store, RUN, [3, 4], 5)
    with pytest.raises(SlotsRetired):
        fold(store, RUN, 1)


def test_low_is_only_ever_raised_also_by_racing_writers(store: Store) -> None:
    assert read_low(store, RUN) == 0
    threads = [threading.Thread(target=raise_low, args=(store, RUN, slot)) for slot in (3, 9, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_low(store, RUN) == 9
    assert raise_low(store, RUN, 4) == 9
    assert read_low(store, RUN) == 9


def test_a_store_of_the_same_folder_in_another_process_sees_the_same_journal(tmp_path: Path) -> None:
    """The zombie test relies on it; here without signals, so that a failure points at the right place."""
    one = LocalStore(tmp_path)
    create_run(one, make_run(run=RUN, created=0.0, num_siblings=1, staleness=None, fingerprints={}, settings={}))
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: len(one.list(RunPaths(RUN).journal)) >= 4)
    finally:
        child.kill()
        child.wait()
    assert claims(one) == [(1, "zombie")]
