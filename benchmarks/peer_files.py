"""The systems of `storage_peers.py` that are a file of one's own: torch.save, pickle, JSON lines. And what a system is.

torch.save and pickle have no append: what a user does is to write the whole state beside the old one, sync it, rename
it, and sync the folder. JSON lines appends the changed rows and syncs; a later line replaces an earlier one.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.peer_rows import COLUMNS, Base, Change, Columns, Payload, newest, place

Plain = tuple[Columns, list[Payload]]


class System(Protocol):
    """What is measured. `publish` returns when the change would survive a loss of power."""

    def create(self, base: Base) -> None: ...
    def publish(self, change: Change) -> None: ...

    def read(self) -> Any:
        """Everything, from the files alone."""
        ...

    def content(self, state: Any) -> Any:
        """All that `read` found, to tell whether two reads found the same."""
        ...

    def plain(self, state: Any) -> Plain:
        """The rows and the payload in `state`, to tell whether two systems hold the same."""
        ...

    def close(self) -> None: ...


def sync(path: Path) -> None:
    """Sync a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Syncer:
    """Makes durable what a library left to the operating system: every new file below a folder, and its folders."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: set[tuple[Path, int]] = set()

    def __call__(self) -> None:
        present: set[tuple[Path, int]] = set()
        for parent, folders, files in os.walk(self._folder):
            found = [(path, path.stat().st_ino) for path in map(Path(parent).joinpath, (*folders, *files))]
            new = [one for one in found if one not in self._known]
            for path, _ in new:
                if path.is_file():
                    sync(path)
            if new:
                sync(Path(parent))
            present.update(found)
        self._known = present


class _Rewritten:
    """The whole state in one file, replaced at each publication."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / "state"
        self._columns: Columns = {}
        self._payload: list[Payload] = []

    def create(self, base: Base) -> None:
        self._columns, self._payload = {name: values.copy() for name, values in base.columns.items()}, [base.payload]
        self._save()

    def publish(self, change: Change) -> None:
        places = place(change.columns)
        for name, values in change.columns.items():
            self._columns[name][places] = values
        self._payload.append(change.payload)
        self._save()

    def _save(self) -> None:
        temp = self._folder / "state.tmp"
        with open(temp, "wb") as file:
            self._dump(self._columns, self._payload, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, self._path)
        sync(self._folder)

    def _dump(self, columns: Columns, payload: list[Payload], file: Any) -> None:
        raise NotImplementedError

    def content(self, state: Any) -> Any:
        return state

    def plain(self, state: Any) -> Plain:
        return state

    def close(self) -> None:
        return None


class Pickle(_Rewritten):
    """pickle protocol 5 of numpy columns."""

    def _dump(self, columns: Columns, payload: list[Payload], file: Any) -> None:
        pickle.dump((columns, [tuple(one) for one in payload]), file, protocol=5)

    def read(self) -> Plain:
        with open(self._path, "rb") as file:
            columns, payload = pickle.load(file)
        return columns, [Payload(*one) for one in payload]


class TorchSave(_Rewritten):
    """torch.save of tensors, torch.load with weights_only."""

    def _dump(self, columns: Columns, payload: list[Payload], file: Any) -> None:
        import torch

        torch.save(
            {
                "columns": {name: torch.from_numpy(values) for name, values in columns.items()},
                "payload": [tuple(torch.from_numpy(part) for part in one) for one in payload],
            },
            file,
        )

    def read(self) -> Plain:
        import torch

        found = torch.load(self._path, weights_only=True)
        columns = {name: values.numpy() for name, values in found["columns"].items()}
        return columns, [Payload(*(part.numpy() for part in one)) for one in found["payload"]]


class JsonLines:
    """One line per changed row and one per payload, each in a file of its own."""

    def __init__(self, folder: Path) -> None:
        self._paths = folder / "rows.jsonl", folder / "payload.jsonl"

    def create(self, base: Base) -> None:
        self._append(base.columns, base.payload)
        sync(self._paths[0].parent)

    def publish(self, change: Change) -> None:
        self._append(change.columns, change.payload)

    def _append(self, columns: Columns, payload: Payload) -> None:
        rows = zip(*(columns[name].tolist() for name in COLUMNS), strict=True)
        self._write(self._paths[1], (dict(zip(Payload._fields, one, strict=True)) for one in
                                     zip(*(part.tolist() for part in payload), strict=True)))  # fmt: skip
        self._write(self._paths[0], (dict(zip(COLUMNS, row, strict=True)) for row in rows))

    @staticmethod
    def _write(path: Path, entries: Any) -> None:
        with open(path, "a") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in entries)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> Plain:
        rows, payload = ([json.loads(line) for line in path.read_text().splitlines()] for path in self._paths)
        columns = {name: np.array([row[name] for row in rows], kind) for name, kind in COLUMNS.items()}
        kinds = (np.int64, np.int32, np.int32, np.int32, np.float32)
        return newest(columns, np.arange(len(rows))), [
            Payload(*(np.array([one[name]], kind) for name, kind in zip(Payload._fields, kinds, strict=True)))
            for one in payload
        ]

    def content(self, state: Any) -> Any:
        return state

    def plain(self, state: Any) -> Plain:
        return state

    def close(self) -> None:
        return None
