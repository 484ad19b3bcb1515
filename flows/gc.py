"""`tidegate gc`: delete what crashes and fenced incarnations left in a run's folder and no record mentions.

What a run keeps of its checkpoints is no matter of this command: see the settings `retention`.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.config import RunConfig
from flows.live import ask_manager, open_reached
from storage.clock import SystemClock
from storage.filesystem import Store
from storage.garbage import KINDS, Garbage, delete_garbage, find_garbage


def add_gc(commands: Any) -> None:
    """The command's part of the command line."""
    about = "delete what crashes left in a run's folder and no record mentions"
    gc = commands.add_parser("gc", help=about, description=about)
    gc.add_argument("name", metavar="RUN")
    gc.add_argument("--storage", default=RunConfig().storage.url, help="storage url (%(default)s)")
    gc.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    gc.add_argument("--pins", action="store_true", help="delete expired pins, too")
    gc.add_argument("--grace-hours", type=float, default=1.0, metavar="N", help="leave temporary files and multipart"
                    " uploads alone that are younger (%(default)s)")  # fmt: skip
    gc.add_argument("--json", action="store_true", help="machine-readable output")
    gc.set_defaults(run=_gc)


def _gc(parsed: argparse.Namespace) -> int:
    store = open_reached(parsed.storage)
    garbage = find_garbage(store, parsed.name, SystemClock(), parsed.grace_hours * 3600)
    failed = [] if garbage.finished else _ask(store, parsed.name, garbage, delete=not parsed.dry_run)
    if not parsed.dry_run:
        failed += delete_garbage(store, garbage, pins=parsed.pins)
    _print(parsed, garbage, failed)
    return 1 if failed else 0


def _ask(store: Store, run: str, garbage: Garbage, *, delete: bool) -> list[str]:
    """Objects of a run that goes on are its manager's to find; returns the keys that could not be deleted."""
    answer = ask_manager(store, run, lambda manager: manager.collect_objects(delete))
    if answer is None:
        return []
    garbage.items["objects"] = list(answer.found)
    garbage.skipped.pop("objects", None)
    if answer.skipped:
        garbage.skipped["objects"] = answer.skipped
    return list(answer.failed)


def _print(parsed: argparse.Namespace, garbage: Garbage, failed: list[str]) -> None:
    sums = {kind: [len(found), sum(item.size for item in found)] for kind, found in garbage.items.items()}
    if parsed.json:
        kinds = {kind: {"count": count, "bytes": size} for kind, (count, size) in sums.items()}
        print(json.dumps({"run": parsed.name, "deleted": not parsed.dry_run, "pins_deleted": parsed.pins,
                          "kinds": kinds, "skipped": garbage.skipped, "failed": failed}))  # fmt: skip
        return
    done = "would be deleted from" if parsed.dry_run else "deleted from"
    table = Table(title=f"{done} run {parsed.name}", title_justify="left")
    notes = dict(garbage.skipped)
    if garbage.items["pins"] and not parsed.pins:
        notes["pins"] = "expired; stay without --pins"
    for column in ("kind", "count", "bytes", *(["left alone, because"] if notes else [])):
        table.add_column(column)
    for kind in KINDS:
        numbers = [f"{number:,}" for number in sums[kind]]
        table.add_row(kind.replace("_", " "), *numbers, *([notes.get(kind, "")] if notes else []))
    Console().print(table)
    for key in failed:
        print(f"could not be deleted: {key}")
