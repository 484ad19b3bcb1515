"""TransferQueue in `storage_peers.py`: its controller and storage units as Ray actors, and its own save of their state.

A rollout is a key, its row the key's tag, its tokens the key's fields. A change is put by `kv_batch_put`; it survives
once `save_checkpoint` has written the whole state again. That does not sync, so its files and folders are synced after.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.peer_files import Plain, Syncer
from benchmarks.peer_rows import COLUMNS, SEALED, SIBLINGS, Base, Change, Columns, Payload

PARTITION = "train"
BATCH = 32
"""Rollouts of one put, as many as a change seals: a saved tensor brings the memory of its whole put along."""


class TransferQueue:
    def __init__(self, folder: Path) -> None:
        self._saved, self._sync = folder / "saved", Syncer(folder)
        self._started = False

    def _start(self) -> Any:
        import transfer_queue

        if not self._started:
            import ray

            os.environ.setdefault("RAY_worker_niceness", "0")  # the others run at this priority too
            if not ray.is_initialized():
                ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            transfer_queue.init()
            self._started = True
        return transfer_queue

    def create(self, base: Base) -> None:
        self._start()
        for start in range(0, len(base.columns["group"]), BATCH):
            part = {name: values[start : start + BATCH] for name, values in base.columns.items()}
            self._put(part, Payload(*(values[start : start + BATCH] for values in base.payload)))
        self._save()

    def publish(self, change: Change) -> None:
        self._put(change.columns, change.payload)
        self._save()

    def _put(self, columns: Columns, payload: Payload) -> None:
        """Rows that are sealed come with their tokens, in the payload's order; of the others only the tags change."""
        import torch
        from tensordict import TensorDict

        queue = self._start()
        keys = [f"{group}/{sibling}" for group, sibling in zip(*_ids(columns), strict=True)]
        tags = [dict(zip(COLUMNS, row, strict=True)) for row in
                zip(*(columns[name].tolist() for name in COLUMNS), strict=True)]  # fmt: skip
        sealed = np.flatnonzero(columns["state"] == SEALED).tolist()
        others = np.flatnonzero(columns["state"] != SEALED).tolist()
        if others:
            queue.kv_batch_put([keys[i] for i in others], PARTITION, tags=[tags[i] for i in others])
        if sealed:
            fields = {name: torch.from_numpy(getattr(payload, name)) for name in ("tokens", "logprobs")}
            queue.kv_batch_put([keys[i] for i in sealed], PARTITION, TensorDict(fields, batch_size=len(sealed)),
                               [tags[i] for i in sealed])  # fmt: skip

    def _save(self) -> None:
        self._start().save_checkpoint(self._saved)
        self._sync()

    def read(self) -> tuple[dict[str, Any], list[str], Any]:
        queue = self._start()
        queue.load_checkpoint(self._saved)
        tags = queue.kv_list(PARTITION)[PARTITION]
        sealed = [key for key, tag in tags.items() if tag["state"] == SEALED]
        return tags, sealed, queue.kv_batch_get(sealed, PARTITION)

    def plain(self, state: tuple[dict[str, Any], list[str], Any]) -> Plain:
        tags, sealed, fields = state
        ordered = sorted(tags.values(), key=lambda tag: tag["group"] * SIBLINGS + tag["sibling"])
        columns = {name: np.array([tag[name] for tag in ordered], kind) for name, kind in COLUMNS.items()}
        return columns, [
            Payload(*(np.array([tags[key][name]]) for name in ("group", "sibling", "attempt")),
                    tokens.numpy()[None], logprobs.numpy()[None])
            for key, tokens, logprobs in zip(sealed, fields["tokens"], fields["logprobs"], strict=True)
        ]  # fmt: skip

    def content(self, state: Any) -> Any:
        return state

    def close(self) -> None:
        if self._started:
            import transfer_queue

            transfer_queue.close()
            self._started = False


class SavedQueue:
    """Reads what `save_checkpoint` wrote without a cluster: the steps of `load_checkpoint`, with the code of the
    controller and of the storage units that loads their files, in this process."""

    def __init__(self, folder: Path) -> None:
        self._saved = folder / "saved"

    def read(self) -> Any:
        from transfer_queue.controller import TransferQueueController
        from transfer_queue.sampler import SequentialSampler
        from transfer_queue.storage.managers import simple_storage_manager as manager
        from transfer_queue.storage.simple_storage import StorageUnitData

        found: list[Any] = []
        if json.loads((self._saved / "metadata.json").read_text()).get("storage_saved"):
            folder = self._saved / manager._SU_SUBDIR
            units = json.loads((folder / manager._SU_INFO_FILE).read_text())
            if len(units) != sum(name.endswith(".pkl") for name in os.listdir(folder)):
                raise ValueError("Storage unit count mismatch")
            for unit in sorted(units, key=lambda unit: unit["position"]):
                data = StorageUnitData()
                data.load_checkpoint(folder / f"su_{unit['position']}_{unit['storage_unit_id']}.pkl")
                found.append((data.field_data, data._active_keys))
        controller = SimpleNamespace(controller_id="", index_manager=SimpleNamespace(), sampler=SequentialSampler())
        load = TransferQueueController.__ray_metadata__.modified_class.load_checkpoint
        load(controller, str(self._saved / "controller_state.pkl"))
        return found, controller.partitions, vars(controller.index_manager), vars(controller.sampler)

    def content(self, state: Any) -> Any:
        return state


def _ids(columns: Columns) -> tuple[list[int], list[int]]:
    return columns["group"].tolist(), columns["sibling"].tolist()
