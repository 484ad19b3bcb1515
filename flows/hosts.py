"""`tidegate hosts`: which hosts of environments wait for acknowledgements, and that one of them is gone for good."""

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
from storage.by_claim import record_by_claim
from storage.clock import SystemClock
from storage.errors import ConfigurationRefused
from storage.ledger import Ledger
from storage.obligation_transitions import owed_to
from storage.schema import ObligationExpired


def add_hosts(commands: Any) -> None:
    """The command's part of the command line."""
    about = "hosts that keep results until they are acknowledged"
    actions = commands.add_parser("hosts", help=about, description=about).add_subparsers(
        required=True, metavar="list|gone"
    )
    listed = actions.add_parser("list", help="which wait for how many acknowledgements")
    gone = actions.add_parser("gone", help="a process of one will never come back: nothing is owed to it any more")
    for one in (listed, gone):
        one.add_argument("name", metavar="RUN")
        one.add_argument("--storage", default=RunConfig().storage.url, help="storage url (%(default)s)")
    listed.add_argument("--json", action="store_true", help="machine-readable output")
    listed.set_defaults(run=_list)
    gone.add_argument("host", metavar="HOST")
    gone.add_argument("boot", metavar="BOOT", help="its process, as `tidegate hosts list` shows it")
    gone.add_argument("--reason", default="a person said so", help="kept in the journal (%(default)s)")
    gone.add_argument("--claim", action="store_true", help="when no manager lives: claim the run to do it, which "
                      "fences one that lives where this machine cannot see it")  # fmt: skip
    gone.set_defaults(run=_gone)


def _list(parsed: argparse.Namespace) -> int:
    found = inspection.owed(open_reached(parsed.storage), parsed.name)
    if parsed.json:
        print(json.dumps(found))
        return 0
    table = Table(title=f"acknowledgements that run {parsed.name} owes", title_justify="left")
    for column in ("host", "boot", "owed"):
        table.add_column(column)
    for one in found:
        table.add_row(one["host"], one["boot"], str(one["owed"]))
    Console().print(table if found else f"run {parsed.name} owes no acknowledgement")
    return 0


def _gone(parsed: argparse.Namespace) -> int:
    store, host, boot = open_reached(parsed.storage), parsed.host, parsed.boot

    nothing_owed = _refused(
        f"run {parsed.name} owes nothing to process {boot!r} of {host!r}",
        "one that it owes to",
        "look at `tidegate hosts list RUN`",
    )

    def check(ledger: Ledger) -> None:
        if not owed_to(ledger, host, boot):
            raise nothing_owed

    async def ask(manager: Any) -> bool:
        await manager.host_gone(host, boot, parsed.reason)
        return True

    if not any((one["host"], one["boot"]) == (host, boot) for one in inspection.owed(store, parsed.name)):
        raise nothing_owed
    if not ask_manager(store, parsed.name, ask):
        if not parsed.claim:
            raise _refused(f"no living manager of run {parsed.name!r} on the cluster this process is told of"
                           " (RAY_ADDRESS)", "a run that is driven now",
                           "resume the run and say it then, or claim the run for it with --claim; that fences a manager"
                           " which lives elsewhere")  # fmt: skip
        record = ObligationExpired(host, boot, parsed.reason)
        record_by_claim(store, parsed.name, [record], "a host is gone", check, SystemClock(), time.sleep)
    print(f"run {parsed.name} owes nothing to process {boot} of {host} any more")
    return 0


def _refused(found: str, expected: str, action: str) -> ConfigurationRefused:
    return ConfigurationRefused(found, expected=expected, action=action, code="host")
