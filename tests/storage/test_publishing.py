"""Captures in reused memory, and their publication: in threads, and by a process that may be killed."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from flows.seaweed import S3Server
from storage.buffers import buffers_digest
from storage.capture import CaptureBuffers
from storage.checkpoint import read_manifest
from storage.errors import ArtifactCorrupt, StorageUnusable, StoreUnavailable, UploadLost
from storage.filesystem import Bytes
from storage.local import LocalStore
from storage.memory import MemoryStore
from storage.opening import open_store
from storage.publisher import Newest, Progress, ThreadPublisher
from storage.publisher_process import PublisherProcess, open_publisher
from storage.runs import RunPaths
from tests.processes import alive, wait_for
from tests.storage.publishing import RUN, SHARD, State, Stuck, begun, capture, check, newest, state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def process(folder: Path) -> Iterator[PublisherProcess]:
    one = PublisherProcess(str(folder))
    yield one
    one.close()


# ---------------------------------------------------------------------- captures


def test_a_capture_of_the_same_tensors_takes_the_same_memory_and_holds_the_new_bytes() -> None:
    buffers = CaptureBuffers(SHARD)
    first = capture(1, state(1), buffers)
    second = capture(2, state(2), buffers)
    assert second.memory is first.memory
    assert buffers_digest(second.buffers(), "{}") == buffers_digest(state(2), "{}")


@pytest.mark.parametrize("other", [state(sizes=(3000, 3000, 9001, 100)), state(sizes=(3000, 3000))])
def test_other_tensors_get_memory_of_their_own(other: State) -> None:
    buffers = CaptureBuffers(SHARD)
    first = capture(1, state(1), buffers)
    second = capture(2, other, buffers)
    assert second.memory is not first.memory
    assert buffers_digest(first.buffers(), "{}") == buffers_digest(state(1), "{}"), "who still has it may read it"
    assert buffers_digest(second.buffers(), "{}") == buffers_digest(other, "{}")


def test_a_state_without_tensors_is_a_checkpoint_too() -> None:
    store = MemoryStore()
    check(store, ThreadPublisher(store).publish(RUN, 1, capture(1, {}), None), {})


# ---------------------------------------------------------------------- what is written


class FailingStore(MemoryStore):
    """Refuses to create keys that contain `refused`."""

    refused = ""

    def create(self, key: str, data: Bytes) -> None:
        if self.refused and self.refused in key:
            raise StoreUnavailable("no answer", expected="an answer", action="retry")
        super().create(key, data)


def test_a_manifest_that_fails_leaves_the_last_checkpoint_valid_and_is_tried_again() -> None:
    store, made = FailingStore(), state(1)
    publisher = ThreadPublisher(store)
    first = publisher.publish(RUN, 1, capture(1, made), None)
    captured = capture(2, state(2))
    store.refused = "/checkpoints/"
    with pytest.raises(StoreUnavailable):
        publisher.publish(RUN, 1, captured, newest(first))
    check(store, first, made)
    store.refused = ""
    second = publisher.publish(RUN, 1, captured, newest(first))
    check(store, second, state(2))
    assert second.written < 1000, "the shards of the first try are there"


def test_after_an_error_no_further_shard_is_begun() -> None:
    store = FailingStore()
    store.refused = "/objects/"
    seen: list[Progress] = []
    made = state(sizes=(4000,) * 200)
    with pytest.raises(StoreUnavailable):
        ThreadPublisher(store, seen.append).publish(RUN, 1, capture(1, made), None)
    assert [progress.done for progress in seen] == [0]
    assert store.list("runs") == []


def test_an_unchanged_state_is_referenced_with_less_than_ten_kilobytes() -> None:
    store, made = MemoryStore(), state(sizes=(400,) * 217)
    publisher = ThreadPublisher(store)
    first = publisher.publish(RUN, 1, capture(1, made), None)
    second = publisher.publish(RUN, 1, capture(2, made), newest(first))
    assert len(read_manifest(store, RUN, *newest(second)).objects) >= 18
    assert 0 < second.written < 10_000
    check(store, second, made)


def test_only_the_shards_of_changed_tensors_are_written() -> None:
    store, made = MemoryStore(), state(sizes=(4000,) * 10)
    publisher, buffers = ThreadPublisher(store), CaptureBuffers(SHARD)
    first = publisher.publish(RUN, 1, capture(1, made, buffers), None)
    changed = {**made, "w3": state(7, (4000,) * 10)["w3"]}
    second = publisher.publish(RUN, 1, capture(2, changed, buffers), newest(first))
    assert len(store.list(RunPaths(RUN).objects)) == 11
    check(store, first, made)
    check(store, second, changed)


def test_a_shard_whose_object_was_lost_from_the_newest_manifest_is_written_although_it_is_unchanged() -> None:
    """What was written before is not taken for what is referenced: another driver's newest checkpoint may be older."""
    store, made = MemoryStore(), state()
    publisher = ThreadPublisher(store)
    publisher.publish(RUN, 1, capture(1, made), None)
    store.delete(store.list(RunPaths(RUN).objects))
    check(store, publisher.publish(RUN, 1, capture(2, made), None), made)


@pytest.mark.parametrize("damage", ["missing", "cut", "flip", "schema"])
def test_a_damaged_newest_manifest_is_no_base_and_stops_no_publication(
    damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, made = MemoryStore(), state()
    publisher = ThreadPublisher(store)
    first = newest(publisher.publish(RUN, 1, capture(1, made), None))
    key = RunPaths(RUN).manifest(first.manifest)
    whole = store._objects.pop(key)
    if damage != "missing":
        store._objects[key] = {
            "cut": whole[:-1],
            "flip": bytes([whole[0] ^ 1]) + whole[1:],
            "schema": whole.replace(b'"schema":1', b'"schema":2'),
        }[damage]
    if damage == "schema":
        first = Newest(first.manifest, hashlib.sha256(store._objects[key]).hexdigest())
    gone = store.list(RunPaths(RUN).objects)[0]
    store.delete([gone])
    second = publisher.publish(RUN, 1, capture(2, made), first)
    check(store, second, made)
    assert store.size(gone) is not None, "nothing is taken for stored that was not looked at"
    assert f"newest={first.manifest} decision=write_everything" in caplog.text


def test_a_store_that_does_not_answer_says_nothing_about_the_newest_manifest() -> None:
    class Silent(MemoryStore):
        def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            raise StoreUnavailable("no answer", expected="an answer", action="retry")

    with pytest.raises(StoreUnavailable):
        ThreadPublisher(Silent()).publish(RUN, 1, capture(1, state()), Newest("000000001-000001.json", "0" * 64))


def test_a_shard_whose_tensors_are_known_to_be_unchanged_is_not_even_read() -> None:
    store, made = MemoryStore(), state()
    publisher, buffers = ThreadPublisher(store), CaptureBuffers(SHARD)
    first = publisher.publish(RUN, 1, capture(1, made, buffers), None)
    again = capture(2, made, buffers)
    again.memory.view[:] = bytes(len(again.memory.view))
    second = publisher.publish(RUN, 1, again, newest(first))
    assert read_manifest(store, RUN, *newest(second)).objects == read_manifest(store, RUN, *newest(first)).objects


# ---------------------------------------------------------------------- in a process of its own


def test_a_process_publishes_what_a_thread_publishes(folder: Path, process: PublisherProcess) -> None:
    made = state()
    written = process.publish(RUN, 1, capture(1, made), None)
    assert written == ThreadPublisher(MemoryStore()).publish(RUN, 1, capture(1, made), None)
    assert process.progress == Progress(written.size, written.size)
    check(LocalStore(folder), written, made)
    pid = process.pid
    again = process.publish(RUN, 1, capture(2, made), newest(written))
    assert again.written < 1000
    assert process.pid == pid, "it is kept"


def test_a_store_in_memory_is_written_by_threads_of_this_process() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    publisher = open_publisher(url)
    assert isinstance(publisher, ThreadPublisher)
    check(open_store(url), publisher.publish(RUN, 1, capture(1, state()), None), state())


def test_a_process_that_is_killed_in_the_middle_leaves_nothing_half_valid_and_the_next_try_ends_it(
    folder: Path, process: PublisherProcess
) -> None:
    store, made = LocalStore(folder), state()
    captured = capture(1, made)
    stuck = Stuck(folder, captured)
    with begun(process, captured, stuck) as publication:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(UploadLost, match="ended with -9"):
            publication.result()
    stuck.path.unlink()
    assert store.list(RunPaths(RUN).checkpoints) == [], "no manifest without all shards"
    check(store, process.publish(RUN, 1, captured, None), made)


def test_a_process_that_died_between_two_checkpoints_is_replaced_silently(
    folder: Path, process: PublisherProcess
) -> None:
    first = process.publish(RUN, 1, capture(1, state(1)), None)
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG))
    check(LocalStore(folder), process.publish(RUN, 1, capture(2, state(2)), newest(first)), state(2))
    assert process.pid != pid


def test_closing_ends_the_process_and_the_publication(folder: Path, process: PublisherProcess) -> None:
    captured = capture(1, state())
    with begun(process, captured, Stuck(folder, captured)) as publication:
        pid = process.pid
        assert pid is not None
        process.close()
        with pytest.raises(UploadLost):
            publication.result()
    assert not alive(pid)


def test_a_second_publication_waits_for_the_first(folder: Path, process: PublisherProcess) -> None:
    made = state()
    captured = capture(1, made)
    stuck = Stuck(folder, captured)
    with begun(process, captured, stuck) as first, ThreadPoolExecutor(1) as pool:
        second = pool.submit(process.publish, RUN, 1, captured, None)
        assert not first.done()
        stuck.path.unlink()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        assert isinstance(first.exception(), UploadLost)
        check(LocalStore(folder), second.result(), made)


class TestErrorsCrossTheProcessAsThemselves:
    def test_another_checkpoint_of_that_name(self, process: PublisherProcess) -> None:
        process.publish(RUN, 1, capture(1, state()), None)
        with pytest.raises(ArtifactCorrupt, match="other content") as caught:
            process.publish(RUN, 1, capture(1, state(5)), None)
        assert (caught.value.code, "000000001-000001.json" in caught.value.found) == ("digest", True)
        assert process.pid is not None
        assert alive(process.pid), "an error of ours does not end it"

    def test_a_place_that_is_no_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        process = PublisherProcess(str(tmp_path / "file"))
        try:
            with pytest.raises(StorageUnusable) as caught:
                process.publish(RUN, 1, capture(1, state()), None)
            assert caught.value.exit_code == 2
        finally:
            process.close()


def test_on_s3_the_process_takes_the_keys_from_the_environment(seaweed: S3Server) -> None:
    url = seaweed.url(f"t/{uuid.uuid4().hex[:8]}")
    process = open_publisher(url)
    assert isinstance(process, PublisherProcess)
    try:
        written = process.publish(RUN, 1, capture(1, state()), None)
        command = Path(f"/proc/{process.pid}/cmdline").read_text()
        assert seaweed.secret not in command
        check(open_store(url), written, state())
    finally:
        process.close()


# ---------------------------------------------------------------------- the death of the trainer

TRAINER = """
import sys
from tests.storage.publishing import RUN, Stuck, begun, capture, state
from storage.publisher_process import PublisherProcess
from pathlib import Path

folder = Path(sys.argv[1])
captured = capture(1, state())
process = PublisherProcess(str(folder))
with begun(process, captured, Stuck(folder, captured)):
    print(process.pid, captured.memory.fd, flush=True)
    sys.stdin.read()
"""


def holders(inode: int) -> set[int]:
    """Processes that have the memory open or mapped; each of them maps it."""
    found: set[int] = set()
    for process in Path("/proc").iterdir():
        with suppress(OSError):  # gone, or another user's
            if process.name.isdigit() and re.search(
                rf" {inode} +/memfd:tidegate-capture", (process / "maps").read_text()
            ):
                found.add(int(process.name))
    return found


def test_when_the_trainer_is_killed_the_process_ends_in_the_middle_and_no_memory_is_left(folder: Path) -> None:
    names = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-c", TRAINER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        child, fd = map(int, trainer.stdout.readline().split())
        inode = os.stat(f"/proc/{trainer.pid}/fd/{fd}").st_ino
        assert holders(inode) == {trainer.pid, child}
        trainer.kill()
    wait_for(lambda: not alive(child))
    wait_for(lambda: not holders(inode))
    assert not {name for name in set(os.listdir("/dev/shm")) - names if "tidegate" in name}


def test_the_capture_of_a_living_trainer_is_freed_when_nobody_needs_it() -> None:
    captured = capture(1, state())
    inode = os.fstat(captured.memory.fd).st_ino
    assert holders(inode) == {os.getpid()}
    del captured
    assert not holders(inode)
