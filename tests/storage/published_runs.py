"""Runs that consist of published checkpoints only, for tests of what looks at those."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from storage.buffers import NamedBuffer, buffers_digest
from storage.capture import CaptureBuffers, capture_of
from storage.clock import VirtualClock
from storage.filesystem import Store
from storage.journal import JournalWriter, claim, store_frozen
from storage.layout import SHARD_BYTES
from storage.publisher import Newest, ThreadPublisher
from storage.runs import create_run, make_run
from storage.schema import CheckpointPublished, ConfigChanged, Record


def floats(*values: float) -> NamedBuffer:
    return tensor("F32", np.array(values, np.float32))


def tensor(dtype: str, values: npt.NDArray[np.generic]) -> NamedBuffer:
    """`values` has the bits of `dtype`; BF16 is given as uint16."""
    return NamedBuffer(dtype, values.shape, np.ascontiguousarray(values).reshape(-1).view(np.uint8))


class Publisher:
    """A new run on `store`. `publish` writes a checkpoint and its record as the product does."""

    def __init__(
        self,
        store: Store,
        run: str = "r",
        fingerprints: Mapping[str, str] = {},
        settings: Mapping[str, object] = {},
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self._store, self._run, clock = store, run, VirtualClock()
        create_run(store, make_run(run=run, created=0.0, num_siblings=2, staleness=1, fingerprints=dict(fingerprints),
                                   settings=dict(settings)))  # fmt: skip
        claimed = claim(store, run, 2, owner="t", writer="w", reason="test", clock=clock)
        self._incarnation = claimed.incarnation
        self._journal = JournalWriter(run, claimed.incarnation, "w", claimed.tail, clock)
        self.shard_bytes = shard_bytes
        self._newest: Newest | None = None

    def publish(self, step: int, buffers: Mapping[str, NamedBuffer], **meta: object) -> CheckpointPublished:
        text = msgspec.json.encode(meta).decode()
        capture = capture_of(
            step, buffers_digest(buffers, text), buffers_digest(buffers), text, buffers,
            buffers=CaptureBuffers(self.shard_bytes),
        )  # fmt: skip
        written = ThreadPublisher(self._store).publish(self._run, self._incarnation, capture, self._newest)
        record = CheckpointPublished(
            step, self._journal.last_seq, written.name, written.digest, written.size, written.written
        )
        self._newest = Newest(written.name, written.digest)
        self._record(record)
        return record

    def change_settings(self, **changes: str) -> None:
        self._record(ConfigChanged({name.replace("__", "."): text for name, text in changes.items()}))

    def _record(self, record: Record) -> None:
        self._journal.append(record)
        frozen = self._journal.freeze()
        store_frozen(self._store, self._run, self._incarnation, frozen)
        self._journal.confirm(frozen)
