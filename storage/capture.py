"""The trainer's state between two optimizer steps, in host memory of its own that already is the checkpoint's files.

Capturing is one copy: headers are written when the layout is made, and tensors go straight to their place in a shard.
The memory is used again for the next capture; a state of other names, dtypes or shapes gets memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from storage.buffers import NamedBuffer
from storage.host_memory import HostMemory, MappedMemory
from storage.layout import SHARD_BYTES, Layout, TensorKind, plan_layout


class Capture(NamedTuple):
    """A state that nobody changes while this capture may still be published.

    `digests` are the sha256 of the tensors' bytes where they are known: they tell which shards are as they were in the
    last checkpoint, without reading them. `meta` is the state that is not a tensor.
    """

    step: int
    state_digest: str
    weights_digest: str
    meta: str
    digests: Mapping[str, str]
    layout: Layout
    memory: HostMemory | MappedMemory

    def buffers(self) -> dict[str, NamedBuffer]:
        """The tensors; views, but for those that are cut."""
        pieces: dict[str, list[npt.NDArray[np.uint8]]] = {name: [] for name in self.layout.tensors}
        for place in _places(self.layout, self.memory):
            pieces[place.tensor].append(place.data)
        return {
            name: NamedBuffer(
                kind.dtype,
                kind.shape,
                pieces[name][0] if len(pieces[name]) == 1 else np.concatenate(pieces[name]),
            )
            for name, kind in self.layout.tensors.items()
        }


class Place(NamedTuple):
    """Where the bytes of `tensor` from `start` on belong."""

    tensor: str
    start: int
    data: npt.NDArray[np.uint8]


class CaptureBuffers:
    """Memory for one capture at a time. Who calls `prepare` knows that nobody publishes the last capture any more."""

    def __init__(self, shard_bytes: int = SHARD_BYTES) -> None:
        self._shard_bytes = shard_bytes
        self._kept: tuple[Layout, HostMemory] | None = None

    def prepare(self, tensors: Mapping[str, TensorKind]) -> tuple[Layout, HostMemory]:
        """The memory of the last capture if it had the same tensors; new memory otherwise, with the headers in it."""
        if self._kept is None or self._kept[0].tensors != dict(tensors):
            self._kept = None  # first, so that two states are never held
            layout = plan_layout(tensors, self._shard_bytes)
            memory = HostMemory(layout.size)
            for shard in layout.shards:
                memory.view[shard.offset : shard.offset + len(shard.header)] = shard.header
            self._kept = layout, memory
        return self._kept

    def places(self) -> Iterator[Place]:
        """Where each part of the prepared tensors has to be copied."""
        assert self._kept is not None, "prepare first"
        return _places(*self._kept)


def _places(layout: Layout, memory: HostMemory | MappedMemory) -> Iterator[Place]:
    whole = np.frombuffer(memory.view, np.uint8)
    for shard in layout.shards:
        for part in shard.parts:
            yield Place(part.tensor, part.start, whole[part.offset : part.offset + part.size])


def capture_of(
    step: int,
    state_digest: str,
    weights_digest: str,
    meta: str,
    state: Mapping[str, NamedBuffer],
    digests: Mapping[str, str] = MappingProxyType({}),
    buffers: CaptureBuffers | None = None,
) -> Capture:
    """A capture of tensors that lie in host memory, in `buffers` or in memory of its own."""
    buffers = buffers or CaptureBuffers()
    layout, memory = buffers.prepare({name: TensorKind(b.dtype, b.shape) for name, b in state.items()})
    for place in buffers.places():
        place.data[:] = state[place.tensor].data[place.start : place.start + len(place.data)]
    return Capture(step, state_digest, weights_digest, meta, digests, layout, memory)
