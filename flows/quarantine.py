"""`tidegate quarantine`: prompts that spent their attempt budget are listed, and released by a person only."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.config import RunConfig
from flows.live import ask_manager, open_reached
from storage import inspection
from storage.clock import SystemClock
from storage.errors import QuarantineRefused
from storage.quarantine import release_by_claim


def add_quarantine(commands: Any) -> None:
    """The command's part of the command line."""
    about = "prompts whose attempts failed too often"
    actions = commands.add_parser("quarantine", help=about, description=about).add_subparsers(
        required=True, metavar="list|release"
    )
    listed = actions.add_parser("list", help="which, and why")
    released = actions.add_parser("release", help="give them another budget")
    for one in (listed, released):
        one.add_argument("name", metavar="RUN")
        one.add_argument("--storage", default=RunConfig().storage.url, help="storage url (%(default)s)")
    listed.add_argument("--json", action="store_true", help="machine-readable output")
    listed.set_defaults(run=_list)
    released.add_argument("groups", metavar="GROUP", nargs="+", type=int)
    released.add_argument("--claim", action="store_true", help="when no manager lives: claim the run to do it, which "
                          "fences one that lives where this machine cannot see it")  # fmt: skip
    released.set_defaults(run=_release)


def _list(parsed: argparse.Namespace) -> int:
    found = inspection.quarantined(open_reached(parsed.storage), parsed.name)
    if parsed.json:
        print(json.dumps(found))
        return 0
    table = Table(title=f"quarantined groups of run {parsed.name}", title_justify="left")
    for column in ("group", "reason", "attempts of its rollouts"):
        table.add_column(column)
    for one in found:
        table.add_row(str(one["group"]), one["reason"], " ".join(map(str, one["attempts"])))
    Console().print(table if found else f"no group of run {parsed.name} is quarantined")
    return 0


def _release(parsed: argparse.Namespace) -> int:
    store, groups = open_reached(parsed.storage), list(dict.fromkeys(parsed.groups))

    async def ask(manager: Any) -> bool:
        await manager.release_quarantined(groups)
        return True

    if not ask_manager(store, parsed.name, ask):
        if not parsed.claim:
            raise QuarantineRefused(
                f"no living manager of run {parsed.name!r} on the cluster this process is told of (RAY_ADDRESS)",
                expected="a run that is driven now",
                action="resume the run and release then, or claim the run for it with --claim; that fences a manager"
                " which lives elsewhere",
            )
        release_by_claim(store, parsed.name, groups, SystemClock(), time.sleep)
    print(f"released {len(groups)} groups of run {parsed.name}")
    return 0
