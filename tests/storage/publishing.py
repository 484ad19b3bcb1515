"""Captures for tests, and publications that stop in their middle for as long as a test wants.

Imports little: a process that a test kills starts with it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from storage.buffers import NamedBuffer, buffers_digest, tensor_digests
from storage.capture import Capture, CaptureBuffers, capture_of
from storage.checkpoint import Written, read_buffers, read_manifest
from storage.filesystem import Store
from storage.publisher import Newest, Progress
from storage.publisher_process import PublisherProcess
from storage.runs import RunPaths
from tests.processes import wait_for

RUN = "r"
SHARD = 4096
State = dict[str, NamedBuffer]


def state(seed: int = 0, sizes: tuple[int, ...] = (3000, 3000, 9000, 100)) -> State:
    dice = np.random.default_rng(seed)
    return {
        f"w{i}": NamedBuffer("U8", (size,), dice.integers(0, 256, size, dtype=np.uint8)) for i, size in enumerate(sizes)
    }


def capture(step: int, made: State, buffers: CaptureBuffers | None = None) -> Capture:
    digests = tensor_digests(made)
    return capture_of(step, buffers_digest(made, "{}"), "w", "{}", made, digests, buffers or CaptureBuffers(SHARD))


def newest(written: Written) -> Newest:
    return Newest(written.name, written.digest)


def check(store: Store, written: Written, made: State) -> None:
    """The checkpoint in the store is exactly that state."""
    manifest = read_manifest(store, RUN, written.name, written.digest)
    found = read_buffers(store, RUN, manifest)
    assert buffers_digest(found, manifest.meta) == buffers_digest(made, "{}") == manifest.state_digest


class Stuck:
    """A publication that waits at the last shard of a capture: its name is taken, by a pipe, and who wants to write it
    waits to read what is there."""

    def __init__(self, folder: Path, captured: Capture) -> None:
        shard = captured.layout.shards[-1]
        self.data = bytes(captured.memory.view[shard.offset : shard.offset + shard.size])
        self.path = folder / RunPaths(RUN).object(hashlib.sha256(self.data).hexdigest())
        self.progress = Progress(captured.layout.num_bytes - shard.size, captured.layout.num_bytes)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(self.path)


@contextmanager
def begun(process: PublisherProcess, captured: Capture, stuck: Stuck) -> Iterator[Future[Written]]:
    """A publication with every shard in the store but the one it waits at."""
    with ThreadPoolExecutor(1) as pool:
        publication = pool.submit(process.publish, RUN, 1, captured, None)
        wait_for(lambda: process.progress == stuck.progress)
        yield publication
