"""A store in this process's memory, for tests, simulations and first steps."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from storage.filesystem import Bytes, check_key, exists, missing, precondition, token_of


class MemoryStore:
    """A store in this process's memory, atomic by one lock. Documented fake: nothing survives the process."""

    def __init__(self, name: str = "") -> None:
        self._url = f"memory://{name}"
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    trouble = ""

    @property
    def url(self) -> str:
        return self._url

    def patient(self, deadline_s: float) -> MemoryStore:
        del deadline_s  # it never waits for an answer
        return self

    def create(self, key: str, data: Bytes) -> None:
        with self._lock:
            if check_key(key) in self._objects:
                raise exists(key, self._url)
            self._objects[key] = bytes(data)

    def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        with self._lock:
            if check_key(key) not in self._objects:
                raise missing(key, self._url)
            return self._objects[key][start:end]

    def size(self, key: str) -> int | None:
        with self._lock:
            found = self._objects.get(check_key(key))
        return None if found is None else len(found)

    def list(self, prefix: str, after: str = "") -> list[str]:
        folder = prefix.rstrip("/") + "/"
        with self._lock:
            return [key for key in self._objects if key > after and key.startswith(folder)]

    def delete(self, keys: Iterable[str]) -> list[str]:
        with self._lock:
            for key in keys:
                self._objects.pop(check_key(key), None)
        return []

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        data = self.read(key)
        return data, token_of(data)

    def swap(self, key: str, data: Bytes, token: str | None) -> str:
        with self._lock:
            found = self._objects.get(check_key(key))
            if (None if found is None else token_of(found)) != token:
                raise precondition(key)
            self._objects[key] = bytes(data)
        return token_of(data)
