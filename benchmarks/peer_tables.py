"""The systems of `storage_peers.py` that are tables: Lance and Delta, one table of rows and one of payload.

Both append; the newest row of a rollout, by `change`, counts. Neither syncs what it writes on a local disk (as strace
saw), so every new file and its folders are synced after it, within the measured time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.peer_files import Plain, Syncer
from benchmarks.peer_rows import COLUMNS, Base, Change, Columns, Payload, newest


def _rows_table(columns: Columns, change: int) -> pa.Table:
    count = len(columns["group"])
    return pa.table({**{name: pa.array(values) for name, values in columns.items()},
                     "change": pa.array(np.full(count, change, np.int32))})  # fmt: skip


def _payload_table(payload: Payload) -> pa.Table:
    def ragged(values: Any) -> Any:
        offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.reshape(-1)))

    ids = {name: pa.array(getattr(payload, name)) for name in ("group", "sibling", "attempt")}
    return pa.table({**ids, "tokens": ragged(payload.tokens), "logprobs": ragged(payload.logprobs)})


class _Tables:
    def __init__(self, folder: Path) -> None:
        self._rows, self._payload = str(folder / "rows"), str(folder / "payload")
        self._sync = Syncer(folder)

    def create(self, base: Base) -> None:
        self._write(_rows_table(base.columns, -1), _payload_table(base.payload))

    def publish(self, change: Change) -> None:
        self._write(_rows_table(change.columns, change.number), _payload_table(change.payload))

    def _write(self, rows: pa.Table, payload: pa.Table) -> None:
        self._append(payload, self._payload)
        self._append(rows, self._rows)
        self._sync()

    def _append(self, table: pa.Table, path: str) -> None:
        raise NotImplementedError

    def _read(self, path: str) -> pa.Table:
        raise NotImplementedError

    def read(self) -> tuple[Columns, pa.Table]:
        rows = self._read(self._rows)
        columns = {name: rows[name].to_numpy() for name in COLUMNS}
        return newest(columns, rows["change"].to_numpy()), self._read(self._payload)

    def content(self, state: tuple[Columns, pa.Table]) -> Any:
        return state[0], state[1].sort_by([("group", "ascending"), ("sibling", "ascending")]).to_pydict()

    def plain(self, state: tuple[Columns, pa.Table]) -> Plain:
        table = state[1]
        parts = [table[name].to_pylist() for name in Payload._fields]
        return state[0], [
            Payload(np.array([g]), np.array([s], np.int32), np.array([a], np.int32), np.array([t], np.int32),
                    np.array([p], np.float32))
            for g, s, a, t, p in zip(*parts, strict=True)
        ]  # fmt: skip

    def close(self) -> None:
        return None


class Lance(_Tables):
    def _append(self, table: pa.Table, path: str) -> None:
        import lance

        lance.write_dataset(table, path, mode="append" if Path(path).exists() else "create")

    def _read(self, path: str) -> pa.Table:
        import lance

        return lance.dataset(path).to_table()


class Delta(_Tables):
    def _append(self, table: pa.Table, path: str) -> None:
        from deltalake import write_deltalake

        write_deltalake(path, table, mode="append")

    def _read(self, path: str) -> pa.Table:
        from deltalake import DeltaTable

        return DeltaTable(path).to_pyarrow_table()
