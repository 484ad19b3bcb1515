"""A trainer's captures: kept while they are published, used again afterwards, repeated after a failure."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from gpu.training.checkpoints import Checkpoints
from gpu.training.trainer import Trainer
from storage.buffers import buffers_digest
from storage.checkpoint import Written, read_buffers, read_manifest
from storage.errors import LeaseRefused, StoreUnavailable
from storage.filesystem import Bytes
from storage.memory import MemoryStore
from storage.publisher import ThreadPublisher
from storage.schema import CheckpointPublished
from tests.gpu.test_training import groups_of, trainer

RUN = "r"


class GatedStore(MemoryStore):
    """Creates nothing before the gate is open; then refuses so many shards."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.reached = threading.Event(), threading.Event()
        self.gate.set()
        self.refusals = 0

    def create(self, key: str, data: Bytes) -> None:
        self.reached.set()
        assert self.gate.wait(60.0)
        if self.refusals and "/objects/" in key:
            self.refusals -= 1
            raise StoreUnavailable("no answer", expected="an answer", action="retry")
        super().create(key, data)


@pytest.fixture
def store() -> GatedStore:
    return GatedStore()


@pytest.fixture
def checkpoints(store: GatedStore) -> Checkpoints:
    return Checkpoints(RUN, ThreadPublisher(store))


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def trained(one: Trainer, step: int) -> str:
    return one.train(step, step, one.state_digest, groups_of(step), step - 1).state_digest


def begin(store: GatedStore, checkpoints: Checkpoints, beside: ThreadPoolExecutor, step: int) -> Future[Written]:
    """A publication that waits at the gate."""
    store.gate.clear()
    publication = beside.submit(checkpoints.publish, step, 1, None)
    assert store.reached.wait(60.0)
    return publication


def stored(store: MemoryStore, written: Written) -> str:
    """The digest of the state that a checkpoint really holds."""
    manifest = read_manifest(store, RUN, written.name, written.digest)
    return buffers_digest(read_buffers(store, RUN, manifest), manifest.meta)


def test_steps_that_train_on_during_a_publication_do_not_change_it(
    store: GatedStore, checkpoints: Checkpoints, beside: ThreadPoolExecutor
) -> None:
    one = trainer()
    first = trained(one, 1)
    assert checkpoints.capture(one, 1) > 0
    publication = begin(store, checkpoints, beside, 1)
    second = trained(one, 2)
    assert checkpoints.capture(one, 2) == 0, "the memory is being read"
    store.gate.set()
    assert stored(store, publication.result()) == first
    assert checkpoints.capture(one, 2) > 0
    assert stored(store, checkpoints.publish(2, 1, None)) == second


def test_a_failed_publication_is_repeated_with_the_same_bytes_while_training_went_on(
    store: GatedStore, checkpoints: Checkpoints
) -> None:
    one = trainer()
    first = trained(one, 1)
    checkpoints.capture(one, 1)
    store.refusals = 1
    with pytest.raises(StoreUnavailable):
        checkpoints.publish(1, 1, None)
    trained(one, 2)
    assert stored(store, checkpoints.publish(1, 1, None)) == first


def test_a_failed_publication_is_given_up_for_a_newer_capture(store: GatedStore, checkpoints: Checkpoints) -> None:
    one = trainer()
    trained(one, 1)
    checkpoints.capture(one, 1)
    store.refusals = 1
    with pytest.raises(StoreUnavailable):
        checkpoints.publish(1, 1, None)
    second = trained(one, 2)
    checkpoints.capture(one, 2)
    with pytest.raises(LeaseRefused, match="no capture of step 1"):
        checkpoints.publish(1, 1, None)
    assert stored(store, checkpoints.publish(2, 1, None)) == second


def test_a_call_that_is_repeated_gets_the_same_answer_and_writes_nothing(
    store: GatedStore, checkpoints: Checkpoints
) -> None:
    one = trainer()
    trained(one, 1)
    size = checkpoints.capture(one, 1)
    written = checkpoints.publish(1, 1, None)
    newest = CheckpointPublished(1, 1, written.name, written.digest, written.size, written.written)
    trained(one, 2)
    assert checkpoints.capture(one, 1) == size
    assert checkpoints.publish(1, 1, newest) == written
    later = checkpoints.publish(1, 2, newest)
    assert (later.name, later.written < 10_000) == ("000000001-000002.json", True), "a later incarnation has its own"


@pytest.mark.parametrize("damage", ["missing", "altered"])
def test_after_a_damaged_checkpoint_the_next_one_refers_to_nothing_unread(
    damage: str, store: GatedStore, checkpoints: Checkpoints
) -> None:
    """Redone steps end in the state of the damaged checkpoint, so the next one wants the very same objects."""
    one = trainer()
    digest = trained(one, 1)
    checkpoints.capture(one, 1)
    written = checkpoints.publish(1, 1, None)
    newest = CheckpointPublished(1, 1, written.name, written.digest, written.size, written.written)
    key = store.list("runs/r/objects")[0]
    store.delete([key])
    if damage == "altered":
        store.create(key, b"altered")
    checkpoints.restart(one, whole=True)
    checkpoints.capture(one, 1)
    assert stored(store, checkpoints.publish(1, 2, newest)) == digest
    assert checkpoints.publish(1, 3, newest).written < 10_000, "then again only what is new"


def test_a_step_that_the_trainer_has_left_is_not_captured(checkpoints: Checkpoints) -> None:
    one = trainer()
    trained(one, 1)
    with pytest.raises(LeaseRefused, match="at step 1"):
        checkpoints.capture(one, 2)


def test_a_restored_trainer_does_not_take_an_older_state_of_the_same_step_for_captured(
    store: GatedStore, checkpoints: Checkpoints, beside: ThreadPoolExecutor
) -> None:
    old, new = trainer(), trainer()
    before = trained(old, 1)
    checkpoints.capture(old, 1)
    publication = begin(store, checkpoints, beside, 1)
    after = new.train(1, 7, "", groups_of(5), 0).state_digest
    checkpoints.restart(new)
    store.gate.set()
    assert stored(store, publication.result()) == before
    with pytest.raises(LeaseRefused, match="no capture"):
        checkpoints.publish(1, 1, None)
    assert checkpoints.capture(new, 1) > 0
    assert stored(store, checkpoints.publish(1, 2, None)) == after
