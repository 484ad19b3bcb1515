"""Databases of rollouts: processes killed in the middle, two processes at once, and statements that may not do harm."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu.environments.resources import Claim, Request, Standing, ToolError, canonical, opened
from gpu.environments.sqlite_host import SqliteHost
from gpu.environments.sqlite_statement import Limits
from tests.gpu.dying_host import CLAIM, SESSION, insert, make_table
from tests.gpu.hosts import refused_with

NEWER = Claim(1, 2)


def child(folder: Path, point: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.gpu.dying_host", str(folder), point]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def numbers(host: SqliteHost) -> list[int]:
    with sqlite3.connect(host.path(SESSION)) as connection:
        return [number for (number,) in connection.execute("select a from t order by rowid")]


@pytest.mark.parametrize(
    ("point", "standing"),
    [
        ("before the statement", Standing.NOT_APPLIED),
        ("after the statement", Standing.NOT_APPLIED),
        ("before the commit", Standing.NOT_APPLIED),
        ("spilled", Standing.NOT_APPLIED),
        ("after the commit", Standing.APPLIED),
    ],
)
async def test_a_process_killed_in_a_request_leaves_its_effect_with_its_receipt_or_neither(
    point: str, standing: Standing, tmp_path: Path
) -> None:
    assert child(tmp_path, point).wait(30) == -signal.SIGKILL
    host = SqliteHost(str(tmp_path))
    applied = standing is Standing.APPLIED
    assert (host.path(SESSION).stat().st_size > 80_000) == (applied or point == "spilled"), "what was 2 is in the file"
    assert await host.claim(SESSION, NEWER) == 2 + applied
    found, reply = await host.standing(SESSION, NEWER, insert(2, 2))
    assert (found, reply is not None) == (standing, applied)
    assert numbers(host) == ([1, 2] if applied else [1])
    again = await host.call(SESSION, NEWER, insert(2, 2))
    assert again.revision == 3
    assert reply in (None, again)
    assert numbers(host) == [1, 2]


@pytest.mark.parametrize("seed", range(4))
async def test_whenever_a_process_is_killed_receipts_tell_what_it_did(seed: int, tmp_path: Path) -> None:
    with child(tmp_path, "insert") as process:
        assert process.stdout is not None
        process.stdout.readline()
        await asyncio.sleep(random.Random(seed).uniform(0.0, 0.2))
        process.kill()
        said = process.stdout.read().split()
    last = int(said[-1]) if said else 1
    host = SqliteHost(str(tmp_path))
    revision = await host.claim(SESSION, NEWER)
    assert revision in (last, last + 1)
    assert numbers(host) == list(range(1, revision))
    for number in range(1, last + 1):
        standing, reply = await host.standing(SESSION, NEWER, insert(number, number))
        assert standing is (Standing.APPLIED if number < revision else Standing.NOT_APPLIED)
        assert (reply.revision if reply else number) == min(number + 1, revision)


async def test_a_process_killed_in_the_start_has_started_nothing(tmp_path: Path) -> None:
    assert child(tmp_path, "start").wait(30) == -signal.SIGKILL
    host = SqliteHost(str(tmp_path))
    assert await host.claim(SESSION, NEWER) is None
    await refused_with("missing", host.call(SESSION, NEWER, make_table()))
    await host.start(SESSION, NEWER, b"", 0)
    assert (await host.call(SESSION, NEWER, make_table())).revision == 1


async def test_a_process_killed_in_a_restore_leaves_what_was_there(tmp_path: Path) -> None:
    assert child(tmp_path, "restore").wait(30) == -signal.SIGKILL
    host = SqliteHost(str(tmp_path))
    assert await host.claim(SESSION, NEWER) == 2
    assert numbers(host) == [1]
    export = await host.export(SESSION, NEWER)
    await host.call(SESSION, NEWER, insert(2, 2))
    await host.restore(SESSION, NEWER, b"", 0, export)
    assert numbers(host) == [1]
    await host.end(SESSION)
    assert [name for name in os.listdir(tmp_path) if not name.startswith("lock-")] == []


async def test_a_journal_without_its_database_means_nothing_to_the_next_one(tmp_path: Path) -> None:
    assert child(tmp_path, "spilled").wait(30) == -signal.SIGKILL
    host = SqliteHost(str(tmp_path))
    host.path(SESSION).unlink()
    await host.start("another", CLAIM, b"", 0)
    export = await host.export("another", CLAIM)
    await host.restore(SESSION, NEWER, b"", 0, export)
    assert await host.claim(SESSION, NEWER) == 0
    assert (await host.call(SESSION, NEWER, make_table())).revision == 1


async def test_of_two_processes_the_one_with_the_older_claim_is_barred(tmp_path: Path) -> None:
    host = SqliteHost(str(tmp_path))
    with child(tmp_path, "insert") as process:
        assert process.stdout is not None
        while process.stdout.readline() != "5\n":
            pass
        revision = await host.claim(SESSION, NEWER)
        assert revision is not None
        assert (await host.call(SESSION, NEWER, insert(2000, revision))).revision == revision + 1
        assert process.stdout.read().split()[-1] == "claimed"
    assert numbers(host) == [*range(1, revision), 2000]
    assert await host.claim(SESSION, NEWER) == revision + 1


async def test_an_export_of_another_revision_than_it_says_is_refused(tmp_path: Path) -> None:
    host = SqliteHost(str(tmp_path))
    await host.start(SESSION, CLAIM, b"", 0)
    export = await host.export(SESSION, CLAIM)
    await host.call(SESSION, CLAIM, make_table())
    wrong = type(export)(3, export.state)
    await refused_with("revision", host.restore(SESSION, CLAIM, b"", 0, wrong))
    assert await host.claim(SESSION, CLAIM) == 1


def test_every_session_has_a_file_of_its_own_whatever_its_name(tmp_path: Path) -> None:
    host = SqliteHost(str(tmp_path))
    names = ["run/g42/3~1", "run/g42/3~10", "../../x", "RUN/g42/3~1", "r" * 500, "r" * 501, "", "ü\n"]
    paths = {host.path(name) for name in names}
    assert len({path.name.lower() for path in paths}) == len(names)
    assert all(path.parent == tmp_path and len(path.name) < 200 for path in paths)


# ---------------------------------------------------------------------- statements


class Desk:
    """One session and its revision."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.host = SqliteHost(str(folder), Limits(**limits))
        self.revision = self.asked = 0

    async def __call__(self, sql: str, *, reads: bool = False) -> Any:
        self.asked += 1
        if self.asked == 1:
            await self.host.start(SESSION, CLAIM, b"", 0)
        operation = "query" if reads else "execute"
        request = Request(f"{self.asked}", operation, canonical({"sql": sql}), self.revision, reads)
        reply = await self.host.call(SESSION, CLAIM, request)
        self.revision = reply.revision
        return opened(reply.content)


async def refuses(desk: Desk, sql: str, why: str | None = None, *, reads: bool = False) -> None:
    before = desk.revision
    with pytest.raises(ToolError, match=why):
        await desk(sql, reads=reads)
    assert desk.revision == before


async def test_statements_give_their_rows_and_how_much_they_changed(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    assert await desk("create table t(a integer primary key autoincrement, b unique)") == {"rows": [], "changed": 0}
    assert await desk("insert into t(b) values (2), (3)") == {"rows": [], "changed": 2}
    assert await desk("update t set b = b + 10 returning b") == {"rows": [[12], [13]], "changed": 2}
    assert desk.revision == 3
    assert (await desk("select b, 1.5, null, x'0aff', 9e999 from t where a = 1", reads=True))["rows"] == [
        [12, 1.5, None, "0aff", "inf"]
    ]
    assert desk.revision == 3
    for sql in ("create view v as select 1", "alter table t rename to u", "create index i on u(b)", "reindex",
                "create trigger g after insert on u begin delete from u where b = 99; end",
                "with n(x) as (select 99) insert into u(b) select x from n", "drop trigger g", "drop view v",
                "drop table u"):  # fmt: skip
        await desk(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "select * from tidegate_receipts",
        "select count(*) from main.tidegate_session",
        'update "Tidegate_Session" set revision = 9',
        "delete from tidegate_receipts",
        "drop table tidegate_receipts",
        "insert into tidegate_session values (1, 1, 1)",
        "alter table tidegate_session rename to s",
        "create index i on tidegate_session(revision)",
        "create trigger g after update on tidegate_session begin select 1; end",
        "create table tidegate_more(a)",
        "create temp table tidegate_session(a)",
        "create temp view v as select 1",
        "create virtual table f using fts5(a)",
        "attach ':memory:' as other",
        "detach main",
        "pragma writable_schema = 1",
        "pragma user_version",
        "select * from pragma_table_info('t')",
        "begin",
        "commit",
        "end",
        "rollback",
        "savepoint s",
        "vacuum",
        "vacuum into 'copy'",
        "analyze",
        "insert into sqlite_master values (1, 1, 1, 1, 1)",
        "select * from dbstat",
        "select load_extension('x')",
        "select fts3_tokenizer('simple')",
        "select random()",
        "select current_timestamp",
        "select datetime('now')",
        "select last_insert_rowid()",
        "select 1; select 2",
        "select ?",
        "select '\0'",
        "select '\ud800'",
        "select cast(x'ff' as text)",
    ],
)
async def test_a_statement_may_not_leave_its_tables(sql: str, tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    await desk("create table t(a)")
    for reads in (False, True):
        await refuses(desk, sql, reads=reads)
    assert (await desk("insert into t values (1)"))["changed"] == 1


@pytest.mark.parametrize("sql", ["insert into t values (1)", "create table u(a)", "delete from t", "drop table t"])
async def test_a_query_changes_nothing(sql: str, tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    await desk("create table t(a)")
    await refuses(desk, sql, "not authorized", reads=True)


async def test_what_a_view_a_trigger_or_a_default_would_do_is_judged_when_it_does_it(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    for sql in (
        "create table t(a, b default (random()))",
        "create table u(a)",
        "create view v as select * from tidegate_session",
        "create trigger g after insert on u begin delete from tidegate_receipts; end",
    ):
        await desk(sql)
    await refuses(desk, "insert into t(a) values (1)", "chance")
    await refuses(desk, "insert into u values (1)", "not authorized")
    await refuses(desk, "select * from v", "prohibited", reads=True)


async def test_a_statement_that_rolls_back_leaves_nothing_and_its_refusal_is_kept(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    await desk("create table t(a unique)")
    await desk("insert into t values (1)")
    for conflict in ("or rollback", "or fail", "or abort", ""):
        await refuses(desk, f"insert {conflict} into t values (7), (1)", "UNIQUE")
    await desk("create trigger g before delete on t begin select raise(rollback, 'never'); end")
    await refuses(desk, "delete from t", "never")
    assert (await desk("select a from t", reads=True))["rows"] == [[1]]
    request = Request(str(desk.asked - 1), "execute", canonical({"sql": "delete from t"}), desk.revision)
    standing, reply = await desk.host.standing(SESSION, CLAIM, request)
    assert standing is Standing.APPLIED
    assert reply is not None
    assert json.loads(reply.content) == {"error": "never"}


async def test_work_result_and_size_are_bounded(tmp_path: Path) -> None:
    desk = Desk(tmp_path, instructions=100_000, rows=3, result=100, value=1000, database=20_000)
    endless = "with recursive c(x) as (select 1 union all select x + 1 from c)"
    await desk("create table t(a)")
    await refuses(desk, f"{endless} select count(*) from c", "too much work", reads=True)
    await refuses(desk, f"{endless} insert into t select x from c", "too much work|full")
    await refuses(desk, f"{endless} select x from c", "more than 3 rows", reads=True)
    await refuses(desk, "select hex(zeroblob(60))", "more than 100 bytes", reads=True)
    await refuses(desk, "select zeroblob(2000)", "too big", reads=True)
    await refuses(desk, "select '" + "a" * 2000 + "'", reads=True)
    for _ in range(10):
        await desk("insert into t values (zeroblob(900))")
    await refuses(desk, "insert into t select a from t", "full")
    assert (await desk("select count(*) from t", reads=True))["rows"] == [[10]]
    await desk("delete from t")


async def test_time_is_bounded_where_instructions_take_long(tmp_path: Path) -> None:
    desk = Desk(tmp_path, instructions=10**12, seconds=0.05)
    endless = "with recursive c(x) as (select 1 union all select x + 1 from c) select count(*) from c"
    await refuses(desk, endless, "too much work", reads=True)


async def test_an_operation_that_does_not_exist_is_refused_and_a_fault_of_the_disk_raises(tmp_path: Path) -> None:
    host = SqliteHost(str(tmp_path))
    await host.start(SESSION, CLAIM, b"", 0)
    reply = await host.call(SESSION, CLAIM, Request("1", "query", canonical({"sql": "select 1"}), 0))
    with pytest.raises(ToolError, match="no operation query"):
        opened(reply.content)
    host.path(SESSION).write_bytes(b"this is no database" * 1000)
    with pytest.raises(sqlite3.DatabaseError):
        await host.claim(SESSION, CLAIM)
