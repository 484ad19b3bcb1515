"""The body of a PUT: bytes that lie somewhere, read piece by piece as they are sent."""

from __future__ import annotations

import io

from storage.filesystem import Bytes


class Body(io.BytesIO):
    """A view of `data` as botocore and aiohttp take it. An `io.BytesIO` by name only, so that aiohttp reads it on its
    event loop; a real one would copy the whole, twice."""

    def __init__(self, data: Bytes) -> None:
        super().__init__()
        self._data, self._at = memoryview(data), 0

    def read(self, size: int | None = -1, /) -> bytes:
        end = len(self._data) if size is None or size < 0 else self._at + size
        piece = bytes(self._data[self._at : end])
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def getbuffer(self) -> memoryview:
        return self._data[:]

    def getvalue(self) -> bytes:
        return bytes(self._data)
