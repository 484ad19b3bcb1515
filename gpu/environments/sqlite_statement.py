"""One statement that a policy wrote, run in a transaction of the host's: what it may touch, how long, how much it says.

The same statement on the same data gives the same result: what differs from call to call (chance, the clock, the
connection) is not to be had. Only tables of the policy's own are seen, and nothing outside the database.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from gpu.environments.resources import ToolError

RESERVED = "tidegate_"
"""Names of tables that a policy neither reads nor writes."""
_MOST_PAGES = 2**31 - 2
_TICK = 1000
"""Instructions of SQLite's virtual machine between two looks at the limits."""
_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_CHANGES = {
    sqlite3.SQLITE_INSERT,
    sqlite3.SQLITE_UPDATE,
    sqlite3.SQLITE_DELETE,
    sqlite3.SQLITE_CREATE_TABLE,
    sqlite3.SQLITE_CREATE_INDEX,
    sqlite3.SQLITE_CREATE_VIEW,
    sqlite3.SQLITE_CREATE_TRIGGER,
    sqlite3.SQLITE_DROP_TABLE,
    sqlite3.SQLITE_DROP_INDEX,
    sqlite3.SQLITE_DROP_VIEW,
    sqlite3.SQLITE_DROP_TRIGGER,
    sqlite3.SQLITE_ALTER_TABLE,
    sqlite3.SQLITE_REINDEX,
}
_TABLES = {sqlite3.SQLITE_READ, sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE}
_INNER = ("sqlite_", "dbstat")
_CATALOGUE = {"sqlite_master", "sqlite_temp_master", "sqlite_sequence"}
_REPLACED = (
    *(("random", 0), ("randomblob", 1), ("last_insert_rowid", 0), ("changes", 0), ("total_changes", 0)),
    *((name, 0) for name in ("current_date", "current_time", "current_timestamp")),
    *((name, -1) for name in ("date", "time", "datetime", "julianday", "strftime", "unixepoch")),
    *(("timediff", 2), ("load_extension", 1), ("load_extension", 2), ("fts3_tokenizer", 1), ("fts3_tokenizer", 2)),
)
"""Functions with their numbers of arguments that differ from call to call or reach outside. They are replaced and not
denied, because SQLite does not ask about those in a DEFAULT."""
_ENVIRONMENT = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_READONLY,
}
"""Primary result codes that are nobody's statement's fault."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one statement: instructions of SQLite's virtual machine, seconds (for the few instructions that take long),
    rows and bytes of the result as JSON, and bytes of one value. `database` is the size of the whole, in bytes."""

    instructions: int = 20_000_000
    seconds: float = 10.0
    rows: int = 100
    result: int = 16_384
    value: int = 65_536
    database: int = 1 << 20


def run_statement(connection: sqlite3.Connection, sql: str, limits: Limits, *, reads: bool) -> dict[str, Any]:
    """The rows that it gives, and how many it changed. Raises `ToolError`; the transaction may be over then, and what
    the statement did may be in it: roll back."""
    try:
        with _confined(connection, limits, reads=reads), closing(connection.execute(sql)) as cursor:
            rows = cursor.fetchmany(limits.rows + 1)
            changed = max(cursor.rowcount, 0)
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _ENVIRONMENT:
            raise
        raise ToolError(_said(str(error))) from error
    except (sqlite3.Warning, ValueError) as error:
        raise ToolError(str(error)) from error
    if len(rows) > limits.rows:
        raise ToolError(f"more than {limits.rows} rows")
    value = {"rows": [[_plain(value) for value in row] for row in rows], "changed": changed}
    if len(json.dumps(value)) > limits.result:
        raise ToolError(f"a result of more than {limits.result} bytes")
    return value


@contextmanager
def _confined(connection: sqlite3.Connection, limits: Limits, *, reads: bool) -> Generator[None]:
    for name, arguments in _REPLACED:
        connection.create_function(name, arguments, _replaced)
    (page,) = connection.execute("PRAGMA page_size").fetchone()
    connection.execute(f"PRAGMA max_page_count = {max(limits.database // page, 1)}")
    length = connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, limits.value)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 100)
    connection.setlimit(sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH, 10)
    connection.set_progress_handler(_budget(limits), _TICK)
    connection.set_authorizer(_judge(_READS if reads else _READS | _CHANGES))
    try:
        yield
    finally:
        connection.set_authorizer(None)
        connection.set_progress_handler(None, 0)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, length)
        connection.execute(f"PRAGMA max_page_count = {_MOST_PAGES}")


def _judge(allowed: set[int]) -> Callable[[int, str | None, str | None, str | None, str | None], int]:
    def judge(action: int, first: str | None, second: str | None, database: str | None, _: str | None) -> int:
        names = [name.lower() for name in (first, second) if name]
        reserved = action != sqlite3.SQLITE_FUNCTION and any(name.startswith(RESERVED) for name in names)
        inner = action in _TABLES and names[0].startswith(_INNER) and names[0] not in _CATALOGUE
        return sqlite3.SQLITE_DENY if action not in allowed or reserved or inner else sqlite3.SQLITE_OK

    return judge


def _budget(limits: Limits) -> Callable[[], bool]:
    left = limits.instructions // _TICK
    deadline = time.monotonic() + limits.seconds

    def spent() -> bool:
        nonlocal left
        left -= 1
        return left < 0 or time.monotonic() > deadline

    return spent


def _replaced(*_: object) -> None:
    raise ValueError("not to be had")


def _said(message: str) -> str:
    if message == "interrupted":
        return "too much work"
    if message == "user-defined function raised exception":
        return "chance, the clock and what depends on the connection are not to be had"
    return message


def _plain(value: Any) -> Any:
    """As JSON has it: bytes are hexadecimal digits, and infinity is a word."""
    if isinstance(value, bytes):
        return value.hex()
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
