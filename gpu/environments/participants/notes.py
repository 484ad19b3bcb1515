"""What the conformance host keeps by default: a counter and notes, and a file that counts every effect.

The file is the oracle of tests: one JSON line for each executed change, written before its reply. What is in it twice
was done twice, whatever anybody says.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from gpu.environments.resources import Request, ToolError
from gpu.environments.sessions import Session
from storage.errors import ConfigurationRefused


class Notes(Session):
    """Changes: `add {by}` returns the counter, `note {text}` the number of notes. Reads: `count`, `notes`. `fail`
    changes the counter, then raises."""

    def __init__(self, task: bytes, seed: int) -> None:
        self._count = 0
        self._notes: list[str] = []

    def handle(self, operation: str, arguments: dict[str, Any]) -> Any:
        match operation, arguments:
            case "add", {"by": int(by)}:
                self._count += by
                return self._count
            case "note", {"text": str(text)}:
                self._notes.append(text)
                return len(self._notes)
            case "count", {}:
                return self._count
            case "notes", {}:
                return self._notes
            case "fail", {}:
                self._count += 1
                raise RuntimeError("told to fail")
            case _:
                raise ToolError(f"no {operation!r} with {sorted(arguments)}: there are add, note, count and notes")

    def export_state(self) -> bytes:
        return json.dumps({"count": self._count, "notes": self._notes}).encode()

    def restore_state(self, data: bytes) -> None:
        state = json.loads(data)
        self._count, self._notes = state["count"], state["notes"]


class EffectLedger:
    """An append-only file. Raises `ConfigurationRefused` for one that cannot be appended to, or is a link."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags, 0o600)
        except OSError as error:
            raise ConfigurationRefused(
                f"the ledger {path}: {error.strerror}",
                expected="a plain file that can be appended to, no link",
                action="correct --ledger",
            ) from error

    def append(self, request: Request, revision: int) -> None:
        line = {"request": request.id, "operation": request.operation, "arguments": json.loads(request.arguments)}
        os.write(self._file, json.dumps({**line, "revision": revision}).encode() + b"\n")
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)
