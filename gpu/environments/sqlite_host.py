"""Databases of rollouts: a file each, whose claim, revision and receipts change in the transaction of the effect.

So what became of a request is never in doubt: after a crash at any instant its receipt is there with its effect, or
neither is. Files outlive the processes that use them, and any process of the node may go on with one. One request at a
time holds for all of them, by a lock on the folder that ends with the process that has it.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import sqlite3
import tempfile
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from gpu.environments.base import CheckpointMode
from gpu.environments.resources import (
    Claim,
    Reply,
    Request,
    ResourceHost,
    Standing,
    ToolError,
    refusal,
    refused,
    success,
)
from gpu.environments.sessions import RECEIPTS
from gpu.environments.sqlite_statement import Limits, run_statement
from storage.errors import ResourceInvalid
from storage.ledger import Export

LOCKS = 64
"""Files of the folder that sessions share as locks, so that none has to be created and removed with a session."""
_NEW = ".new"
"""Ends the name of a file that is to take the place of a session's."""
_SCHEMA = """
    CREATE TABLE main.tidegate_session (revision INTEGER, incarnation INTEGER, attempt INTEGER);
    CREATE TABLE main.tidegate_receipts (id TEXT PRIMARY KEY, digest TEXT, content BLOB, revision INTEGER)
        WITHOUT ROWID;
"""


class SqliteHost(ResourceHost):
    """`execute` {"sql"} changes a database, `query` {"sql"} reads it; both return {"rows", "changed"}.

    `folder` is on a disk of the node, by default below its folder for temporary files, for all runs of a user: session
    names begin with the run's. Sessions of rollouts that ended elsewhere, or never, stay there until it is emptied.
    """

    checkpoint_mode = CheckpointMode.EXPORT_RESTORE
    replayable = True
    survives = True

    def __init__(self, folder: str | None = None, limits: Limits | None = None) -> None:
        default = Path(tempfile.gettempdir()) / f"tidegate-{os.getuid()}" / "workspaces"
        self._folder = default if folder is None else Path(folder).expanduser()
        self._limits = limits or Limits()

    def path(self, session: str) -> Path:
        """The file of a session. Its name tells a person which one, and its digest makes it the only one."""
        digest = hashlib.sha256(session.encode()).hexdigest()
        return self._folder / f"{quote(session, safe='')[-100:]}.{digest[:16]}.db"

    # ------------------------------------------------------------------ `ResourceHost`

    async def start(self, session: str, claim: Claim, task: bytes, seed: int) -> None:
        await asyncio.to_thread(self._start, session, claim)

    async def claim(self, session: str, claim: Claim) -> int | None:
        return await asyncio.to_thread(self._claim, session, claim)

    async def call(self, session: str, claim: Claim, request: Request) -> Reply:
        return await asyncio.to_thread(self._call, session, claim, request)

    async def standing(self, session: str, claim: Claim, request: Request) -> tuple[Standing, Reply | None]:
        return await asyncio.to_thread(self._standing, session, claim, request)

    async def export(self, session: str, claim: Claim) -> Export:
        return await asyncio.to_thread(self._export, session, claim)

    async def restore(self, session: str, claim: Claim, task: bytes, seed: int, export: Export) -> None:
        await asyncio.to_thread(self._restore, session, claim, export)

    async def end(self, session: str) -> None:
        await asyncio.to_thread(self._end, session)

    # ------------------------------------------------------------------ the same, blocking

    def _start(self, session: str, claim: Claim) -> None:
        with self._locked(session) as path:
            if path.exists():
                with self._opened(path) as connection:
                    if _holder(connection, session, claim) == claim:
                        return
            self._remove(path)
            with self._opened(path, create=True) as connection:
                connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA}")
                connection.execute("INSERT INTO main.tidegate_session VALUES (0, ?, ?)", claim)
                self._commit(connection)

    def _claim(self, session: str, claim: Claim) -> int | None:
        with self._locked(session) as path:
            if not path.exists():
                return None
            with self._opened(path) as connection:
                return None if _holder(connection, session, claim) is None else _take(connection, claim)

    def _call(self, session: str, claim: Claim, request: Request) -> Reply:
        with self._transaction(session, claim) as connection:
            known = _receipt(connection, session, request)
            if known is not None:
                return known
            revision = _revision(connection)
            if request.revision != revision:
                raise refused(session, f"revision {revision}", f"revision {request.revision}", "revision")
            if request.reads:
                return Reply(self._run(connection, request), revision)
            (made,) = connection.execute("SELECT count(*) FROM main.tidegate_receipts").fetchone()
            if made >= RECEIPTS:
                raise refused(session, f"{RECEIPTS} changes", "fewer", "receipts")
            reply = self._changed(connection, request)
            self._keep(connection, request, reply)
            return reply

    def _changed(self, connection: sqlite3.Connection, request: Request) -> Reply:
        """A refused statement leaves nothing in the transaction, however it was refused."""
        content = self._run(connection, request)
        if "error" not in json.loads(content):
            return Reply(content, request.revision + 1)
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        connection.execute("BEGIN IMMEDIATE")
        return Reply(content, request.revision)

    def _run(self, connection: sqlite3.Connection, request: Request) -> bytes:
        try:
            if request.operation != ("query" if request.reads else "execute"):
                raise ToolError(f"no operation {request.operation}: execute changes, query reads")
            sql = json.loads(request.arguments)["sql"]
            return success(run_statement(connection, sql, self._limits, reads=request.reads))
        except ToolError as error:
            return refusal(error)

    def _keep(self, connection: sqlite3.Connection, request: Request, reply: Reply) -> None:
        connection.execute(
            "INSERT INTO main.tidegate_receipts VALUES (?, ?, ?, ?)",
            (request.id, request.digest, reply.content, reply.revision),
        )
        connection.execute("UPDATE main.tidegate_session SET revision = ?", (reply.revision,))
        self._commit(connection)

    def _standing(self, session: str, claim: Claim, request: Request) -> tuple[Standing, Reply | None]:
        with self._transaction(session, claim) as connection:
            known = _receipt(connection, session, request)
            return (Standing.NOT_APPLIED, None) if known is None else (Standing.APPLIED, known)

    def _export(self, session: str, claim: Claim) -> Export:
        with self._transaction(session, claim) as connection:
            return Export(_revision(connection), connection.serialize())

    def _restore(self, session: str, claim: Claim, export: Export) -> None:
        with self._locked(session) as path:
            if path.exists():
                with self._opened(path) as connection:
                    _holder(connection, session, claim)
            new = path.with_name(path.name + _NEW)
            self._remove(new)
            _write(new, export.state)
            with self._opened(new) as connection:
                revision = _take(connection, claim)
            if revision != export.revision:
                raise refused(session, f"an export of revision {revision}", f"revision {export.revision}", "revision")
            _journal(path).unlink(missing_ok=True)
            os.replace(new, path)
            _sync(path.parent)

    def _end(self, session: str) -> None:
        with self._locked(session) as path:
            self._remove(path)
            self._remove(path.with_name(path.name + _NEW))

    # ------------------------------------------------------------------ files

    @contextmanager
    def _locked(self, session: str) -> Generator[Path]:
        """The file of a session, for one at a time of all processes."""
        path = self.path(session)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stripe = hashlib.sha256(session.encode()).digest()[0] % LOCKS
        lock = os.open(self._folder / f"lock-{stripe:02d}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield path
        finally:
            os.close(lock)

    @contextmanager
    def _opened(self, path: Path, *, create: bool = False) -> Generator[sqlite3.Connection]:
        """A connection; what a process that died had under way is undone by opening it."""
        mode = "rwc" if create else "rw"
        with closing(
            sqlite3.connect(
                f"file:{quote(str(path.absolute()))}?mode={mode}", uri=True, isolation_level=None, cached_statements=0
            )
        ) as connection:
            connection.execute("PRAGMA page_size = 1024")
            connection.execute("PRAGMA synchronous = EXTRA")  # FULL, and the removal of the journal lasts too
            yield connection

    @contextmanager
    def _transaction(self, session: str, claim: Claim) -> Generator[sqlite3.Connection]:
        """Of the claim that holds the session, with nothing newer in it. What is not committed is undone."""
        with self._locked(session) as path:
            if not path.exists():
                raise _missing(session)
            with self._opened(path) as connection:
                connection.execute("BEGIN IMMEDIATE")
                if _holder(connection, session, claim) is None:
                    raise _missing(session)
                yield connection

    def _remove(self, path: Path) -> None:
        """The journal last: without it a database may be half a transaction, and it alone is removed by who comes."""
        path.unlink(missing_ok=True)
        _journal(path).unlink(missing_ok=True)

    def _commit(self, connection: sqlite3.Connection) -> None:
        connection.execute("COMMIT")


def _holder(connection: sqlite3.Connection, session: str, claim: Claim) -> Claim | None:
    """Who holds the session, None when its start did not come to its end. Raises `ResourceInvalid`: somebody newer."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'tidegate_session'").fetchone():
        return None
    held = Claim(*connection.execute("SELECT incarnation, attempt FROM main.tidegate_session").fetchone())
    if claim < held:
        found = f"attempt {claim.attempt} of incarnation {claim.incarnation}"
        expected = f"attempt {held.attempt} of incarnation {held.incarnation}, which claimed it"
        raise refused(session, found, expected, "claimed")
    return held


def _revision(connection: sqlite3.Connection) -> int:
    return connection.execute("SELECT revision FROM main.tidegate_session").fetchone()[0]


def _take(connection: sqlite3.Connection, claim: Claim) -> int:
    """Durably; returns the revision."""
    connection.execute("UPDATE main.tidegate_session SET incarnation = ?, attempt = ?", claim)
    return _revision(connection)


def _receipt(connection: sqlite3.Connection, session: str, request: Request) -> Reply | None:
    found = connection.execute(
        "SELECT digest, content, revision FROM main.tidegate_receipts WHERE id = ?", (request.id,)
    ).fetchone()
    if found is None:
        return None
    digest, content, revision = found
    if digest != request.digest:
        raise refused(
            session, f"request {request.id} with input {request.digest[:12]}", f"input {digest[:12]}", "receipt"
        )
    return Reply(content, revision)


def _missing(session: str) -> ResourceInvalid:
    return refused(session, "no such session", "a session that was started", "missing")


def _journal(path: Path) -> Path:
    return path.with_name(path.name + "-journal")


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
