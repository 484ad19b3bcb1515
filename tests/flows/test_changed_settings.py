"""A run that goes on with other settings says so in its journal: which, from what, to what, and since when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flows.config import RunConfig
from gpu.prepare import claim_manager
from storage.clock import SystemClock
from storage.history import read_all
from storage.journal import fold, rows_of, store_frozen
from storage.local import LocalStore
from storage.schema import ConfigChanged


def go_on(folder: Path, **changes: dict[str, Any]) -> None:
    """One incarnation, from its claim until its first records are durable."""
    spec = RunConfig.model_validate({"run": "r", "storage": {"url": str(folder)}, **changes}).spec("r")
    manager = claim_manager(LocalStore(folder), spec, SystemClock(), "o", "test")
    journal = manager.control.books.journal
    if journal.last_seq > journal.durable_seq:
        store_frozen(LocalStore(folder), "r", manager.incarnation, journal.freeze())


def recorded(folder: Path) -> list[dict[str, str]]:
    rows = rows_of(read_all(LocalStore(folder), "r"))
    return [row.record.changes for row in rows if isinstance(row.record, ConfigChanged)]


def test_each_change_of_a_setting_is_recorded_once_and_against_what_was_in_force(tmp_path: Path) -> None:
    go_on(tmp_path)
    go_on(tmp_path)
    assert recorded(tmp_path) == [], "the same settings"
    go_on(tmp_path, training={"learning_rate": 0.5})
    (first,) = recorded(tmp_path)
    assert {name: text.split(" -> ")[1] for name, text in first.items()} == {"training.learning_rate": "0.5"}
    go_on(tmp_path, training={"learning_rate": 0.5})
    assert recorded(tmp_path) == [first], "in force already"
    go_on(tmp_path, training={"learning_rate": 0.25}, checkpoint={"every": 7})
    go_on(tmp_path)
    _, second, third = recorded(tmp_path)
    assert second["training.learning_rate"] == "0.5 -> 0.25"
    assert second["checkpoint.every"].endswith(" -> 7")
    assert third["training.learning_rate"].startswith("0.25 -> ")
    assert third.keys() == second.keys(), "back to what the run began with"
    assert set(fold(LocalStore(tmp_path), "r", 8)[0].settings) == set(second)
