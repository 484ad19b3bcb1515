"""A process that uses a session and dies where it is told: `python -m tests.gpu.dying_host FOLDER POINT`.

It starts the session, makes table t, inserts 1, and dies in the request that inserts 2. At the point `insert` it does
not die: it inserts numbers, one request each, saying each number before it, until it is refused, and says the code.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from gpu.environments import sqlite_host
from gpu.environments.resources import Claim, Request, canonical
from gpu.environments.sqlite_host import SqliteHost
from storage.errors import ResourceInvalid

SESSION = "run/g42/3~1"
CLAIM = Claim(1, 1)
WIDE = ", hex(zeroblob(20000))"
"""Beside each number: more than the cache of the point `spilled`."""


def insert(number: int, revision: int) -> Request:
    arguments = canonical({"sql": f"insert into t values ({number}{WIDE})"})
    return Request(f"{SESSION}.{number}", "execute", arguments, revision)


def make_table() -> Request:
    return Request(f"{SESSION}.table", "execute", canonical({"sql": "create table t(a, b)"}), 0)


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


class Dying(SqliteHost):
    point = ""

    def _run(self, connection: sqlite3.Connection, request: Request) -> bytes:
        if self.point == "before the statement":
            die()
        content = super()._run(connection, request)
        if self.point == "after the statement":
            die()
        return content

    def _commit(self, connection: sqlite3.Connection) -> None:
        if self.point in ("before the commit", "spilled"):
            die()
        super()._commit(connection)
        if self.point == "after the commit":
            die()

    @contextmanager
    def _opened(self, path: Path, *, create: bool = False) -> Generator[sqlite3.Connection]:
        with super()._opened(path, create=create) as connection:
            if self.point == "spilled":
                connection.execute("PRAGMA cache_size = 2")
            yield connection


async def die_at(host: Dying, point: str) -> None:
    if point == "start":
        host.point = "before the commit"
    await host.start(SESSION, CLAIM, b"", 0)
    await host.call(SESSION, CLAIM, make_table())
    await host.call(SESSION, CLAIM, insert(1, 1))
    if point == "restore":
        export = await host.export(SESSION, CLAIM)
        sqlite_host.os.replace = lambda *_: die()
        await host.restore(SESSION, CLAIM, b"", 0, export)
    host.point = point
    await host.call(SESSION, CLAIM, insert(2, 2))


async def insert_until_refused(host: SqliteHost) -> None:
    await host.start(SESSION, CLAIM, b"", 0)
    await host.call(SESSION, CLAIM, make_table())
    for number in range(1, 1000):
        print(number, flush=True)
        try:
            await host.call(SESSION, CLAIM, insert(number, number))
        except ResourceInvalid as error:
            print(error.code, flush=True)
            return


if __name__ == "__main__":
    folder, point = sys.argv[1:]
    host = Dying(folder, sqlite_host.Limits(database=1 << 26))
    asyncio.run(insert_until_refused(host) if point == "insert" else die_at(host, point))
