"""Sessions over HTTP: each change once whatever is lost on the way, and no answer that is not known to be true."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import ClientSession, web

from gpu.environments.base import CheckpointMode
from gpu.environments.participants.client import HttpHost
from gpu.environments.participants.errors import (
    AccessRefused,
    CompletionRefused,
    HostFailed,
    HostUnreachable,
    OutcomeUnknown,
)
from gpu.environments.participants.notes import EffectLedger
from gpu.environments.participants.transport import Transport
from gpu.environments.resources import Claim, Standing, ToolError, canonical, opened
from gpu.environments.sessions import Session
from storage.errors import ConfigurationRefused, ResourceInvalid
from tests.gpu.participants.hosts import ONE, SESSION, HostProcess, effects, host, owed, proxied, request


@contextlib.asynccontextmanager
async def using(transport: Transport):
    resource = HttpHost(transport)
    try:
        yield resource
    finally:
        await resource.close()


async def test_a_session_counts_its_changes_and_repeats_its_replies(tmp_path: Path) -> None:
    ledger = tmp_path / "effects"
    async with host(ledger=ledger) as running, using(running.transport()) as notes:
        await notes.start(SESSION, ONE, b"", 0)
        first = await notes.call(SESSION, ONE, request(0, 0))
        assert (opened(first.content), first.revision) == (1, 1)
        assert await notes.call(SESSION, ONE, request(0, 0)) == first, "the stored reply"
        assert opened((await notes.call(SESSION, ONE, request(1, 1, "count", reads=True))).content) == 1
        with pytest.raises(ResourceInvalid) as refused:
            await notes.call(SESSION, ONE, request(0, 0, by=2))
        assert refused.value.code == "receipt"
        with pytest.raises(ResourceInvalid) as refused:
            await notes.call(SESSION, ONE, request(2, 0))
        assert refused.value.code == "revision"
        with pytest.raises(ToolError):
            opened((await notes.call(SESSION, ONE, request(3, 1, "fly"))).content)
        assert effects(ledger) == {f"{SESSION}.0.0": 1}
        assert notes.replayable


async def test_many_copies_of_one_request_at_once_count_once(tmp_path: Path) -> None:
    ledger = tmp_path / "effects"
    async with host(ledger=ledger) as running, using(running.transport()) as notes:
        await notes.start(SESSION, ONE, b"", 0)
        replies = await asyncio.gather(*(notes.call(SESSION, ONE, request(0, 0)) for _ in range(20)))
        assert len(set(replies)) == 1
        assert effects(ledger) == {f"{SESSION}.0.0": 1}


async def test_a_change_whose_reply_is_lost_is_sent_once_and_its_standing_has_the_reply(tmp_path: Path) -> None:
    ledger = tmp_path / "effects"
    async with host(ledger=ledger) as running, proxied(running) as proxy, using(running.transport(proxy.url)) as notes:
        await notes.start(SESSION, ONE, b"", 0)
        proxy.lost["sessions/call"] = 1
        with pytest.raises(OutcomeUnknown):
            await notes.call(SESSION, ONE, request(0, 0))
        assert proxy.seen["sessions/call"] == 1
        found, reply = await notes.standing(SESSION, ONE, request(0, 0))
        assert found is Standing.APPLIED
        assert reply is not None
        assert (opened(reply.content), reply.revision) == (1, 1)
        proxy.kept["sessions/call"] = 1
        with pytest.raises(OutcomeUnknown):
            await notes.call(SESSION, ONE, request(1, 1))
        assert await notes.standing(SESSION, ONE, request(1, 1)) == (Standing.NOT_APPLIED, None)
        assert effects(ledger) == {f"{SESSION}.0.0": 1}


@pytest.mark.parametrize(
    ("status", "body"), [(502, b"<html>Bad gateway"), (502, b'{"detail": "no"}'), (200, b"<html>")]
)
async def test_an_answer_that_is_not_the_hosts_leaves_the_outcome_unknown(status: int, body: bytes) -> None:
    async with host() as running, proxied(running) as proxy, using(running.transport(proxy.url)) as notes:
        await notes.start(SESSION, ONE, b"", 0)
        proxy.answers["sessions/call"] = web.Response(status=status, body=body)
        with pytest.raises(OutcomeUnknown):
            await notes.call(SESSION, ONE, request(0, 0))
        assert proxy.seen["sessions/call"] == 1


async def test_what_changes_nothing_more_is_asked_for_again(tmp_path: Path) -> None:
    ledger = tmp_path / "effects"
    async with host(ledger=ledger) as running, proxied(running) as proxy, using(running.transport(proxy.url)) as notes:
        for path in ("capabilities", "sessions/start", "sessions/claim", "sessions/export", "sessions/restore"):
            proxy.lost[path] = 2
        await notes.start(SESSION, ONE, b"", 0)
        await notes.call(SESSION, ONE, request(0, 0))
        assert await notes.claim(SESSION, Claim(1, 1)) == 1
        export = await notes.export(SESSION, Claim(1, 1))
        await notes.restore(SESSION, Claim(1, 1), b"", 0, export)
        proxy.lost["sessions/call"] = 2
        assert opened((await notes.call(SESSION, Claim(1, 1), request(1, 1, "count", reads=True))).content) == 1
        proxy.lost["sessions/end"] = 2
        await notes.end(SESSION)
        assert effects(ledger) == {f"{SESSION}.0.0": 1}


async def test_a_restore_that_arrives_once_more_does_not_take_back_what_came_after_it() -> None:
    async with host() as running, using(running.transport()) as notes:
        await notes.start(SESSION, ONE, b"", 0)
        export = await notes.export(SESSION, ONE)
        await notes.restore(SESSION, Claim(1, 1), b"", 0, export)
        await notes.call(SESSION, Claim(1, 1), request(0, 0))
        await notes.restore(SESSION, Claim(1, 1), b"", 0, export)
        assert await notes.claim(SESSION, Claim(1, 1)) == 1


async def test_a_claim_bars_older_attempts() -> None:
    async with host() as running, using(running.transport()) as notes:
        await notes.start(SESSION, ONE, b"", 0)
        assert await notes.claim(SESSION, Claim(2, 1)) == 0
        for late in (
            notes.call(SESSION, ONE, request(0, 0)),
            notes.standing(SESSION, ONE, request(0, 0)),
            notes.start(SESSION, ONE, b"", 0),
            notes.export(SESSION, ONE),
            notes.claim(SESSION, ONE),
        ):
            with pytest.raises(ResourceInvalid) as refused:
                await late
            assert refused.value.code == "claimed"


async def test_a_handler_that_raises_leaves_only_its_own_session_uncertain(tmp_path: Path) -> None:
    ledger = tmp_path / "effects"
    async with host(ledger=ledger) as running, using(running.transport()) as notes:
        for session in (SESSION, "run/g1/0~0"):
            await notes.start(session, ONE, b"", 0)
        with pytest.raises(HostFailed, match="told to fail"):
            await notes.call(SESSION, ONE, request(0, 0, "fail"))
        assert await notes.standing(SESSION, ONE, request(0, 0, "fail")) == (Standing.UNKNOWN, None)
        with pytest.raises(ResourceInvalid) as refused:
            await notes.call(SESSION, ONE, request(1, 0))
        assert refused.value.code == "uncertain"
        assert (await notes.call("run/g1/0~0", ONE, request(2, 0))).revision == 1


# ---------------------------------------------------------------------- processes


async def test_after_a_kill_the_other_process_does_not_know_what_became_of_a_request(tmp_path: Path) -> None:
    """Effects that leave the session: restored or started over, its standing is unknown for ever."""
    ledger = tmp_path / "effects"
    async with HostProcess("--ledger", str(ledger), "--no-replayable") as process:
        transport = Transport(process.url, "notes", timeout_s=5.0, patience_s=20.0)
        async with using(transport) as notes:
            await notes.start(SESSION, ONE, b"", 0)
            await notes.call(SESSION, ONE, request(0, 0))
            export = await notes.export(SESSION, ONE)
            await notes.call(SESSION, ONE, request(1, 1))
            before, _ = await notes.unacknowledged()
            await process.again()
            after, _ = await notes.unacknowledged()
            assert (before.name, before.boot != after.boot) == (after.name, True)
            assert await notes.standing(SESSION, ONE, request(1, 1)) == (Standing.UNKNOWN, None)
            newer = Claim(2, 1)
            assert await notes.claim(SESSION, newer) is None
            await notes.restore(SESSION, newer, b"", 0, export)
            assert await notes.standing(SESSION, newer, request(1, 1)) == (Standing.UNKNOWN, None)
            assert await notes.claim(SESSION, Claim(2, 2)) == 1
            assert await notes.standing(SESSION, Claim(2, 2), request(1, 1)) == (Standing.UNKNOWN, None)
            await notes.end(SESSION)
            await notes.start(SESSION, Claim(2, 3), b"", 0)
            assert await notes.standing(SESSION, Claim(2, 3), request(0, 0)) == (Standing.UNKNOWN, None)
            assert effects(ledger) == {f"{SESSION}.0.0": 1, f"{SESSION}.0.1": 1}


async def test_after_a_kill_effects_that_stayed_inside_a_session_are_made_again_from_its_export() -> None:
    async with host(boot="b1") as old, using(old.transport()) as notes:
        await notes.start(SESSION, ONE, b"", 0)
        await notes.call(SESSION, ONE, request(0, 0))
        export = await notes.export(SESSION, ONE)
        made = await notes.call(SESSION, ONE, request(1, 1))
    async with host(boot="b2") as new, using(new.transport()) as notes:
        assert await notes.claim(SESSION, Claim(2, 1)) is None
        await notes.restore(SESSION, Claim(2, 1), b"", 0, export)
        assert await notes.standing(SESSION, Claim(2, 1), request(1, 1)) == (Standing.NOT_APPLIED, None)
        assert await notes.call(SESSION, Claim(2, 1), request(1, 1)) == made


async def test_a_host_that_does_not_answer_leaves_the_standing_unknown() -> None:
    async with host() as running, using(running.transport(patience_s=0.3)) as notes:
        await notes.start(SESSION, ONE, b"", 0)
        await running.runner.cleanup()
        assert await notes.standing(SESSION, ONE, request(0, 0)) == (Standing.UNKNOWN, None)
        with pytest.raises(HostUnreachable):
            await notes.export(SESSION, ONE)


async def test_a_request_is_bounded_by_its_timeout() -> None:
    class Slow(Session):
        def __init__(self, task: bytes, seed: int) -> None:
            self._task = task

        async def handle(self, operation: str, arguments: dict[str, Any]) -> Any:
            await asyncio.sleep(1.0)
            return self._task.decode()

    async with host(make=Slow) as running, using(running.transport(timeout_s=0.2)) as notes:
        await notes.start(SESSION, ONE, b"task", 0)
        with pytest.raises(OutcomeUnknown):
            await notes.call(SESSION, ONE, request(0, 0))
        found, reply = await notes.standing(SESSION, ONE, request(0, 0))
        assert found is Standing.APPLIED, "it waits for the one that is under way"
        assert reply is not None


# ---------------------------------------------------------------------- completed results over HTTP


RESULT = canonical({"reward": 1.0})
LINEAGE = "g0/0~0", "g0/0~0.3"


async def test_a_result_whose_receipt_was_lost_gets_the_same_receipt_again() -> None:
    async with host() as running, proxied(running) as proxy, using(running.transport(proxy.url)) as notes:
        await notes.start(SESSION, ONE, b"", 0)
        proxy.lost["sessions/end"] = 1
        receipt = await notes.complete(SESSION, ONE, RESULT, *LINEAGE)
        assert proxy.seen["sessions/end"] == 2
        assert receipt is not None
        assert (receipt.boot, receipt.session, receipt.capture, receipt.call) == ("b1", SESSION, *LINEAGE)
        _, results = await notes.unacknowledged()
        assert [one.receipt.digest for one in results] == [receipt.digest]
        for late in (notes.start(SESSION, ONE, b"", 0), notes.call(SESSION, ONE, request(0, 0))):
            with pytest.raises(CompletionRefused):
                await late
        with pytest.raises(CompletionRefused):
            await notes.complete(SESSION, ONE, canonical({"reward": 0.0}), *LINEAGE)
        proxy.lost["completions/acknowledge"] = 1
        for _ in range(2):
            assert await notes.acknowledge("b1", [owed(receipt)])
        assert not (await notes.unacknowledged())[1]
        for late in (notes.start(SESSION, ONE, b"", 0), notes.complete(SESSION, ONE, RESULT, *LINEAGE)):
            with pytest.raises(CompletionRefused):
                await late
        assert not running.core.sessions.whole(), "the session went with its result"


async def test_a_batch_with_one_receipt_that_does_not_fit_releases_none() -> None:
    async with host() as running, using(running.transport()) as notes:
        batch = []
        for group in range(3):
            session = f"run/g{group}/0~0"
            await notes.start(session, ONE, b"", 0)
            batch.append(owed(await notes.complete(session, ONE, RESULT, *LINEAGE)))
        wrong = msgspec.structs.replace(batch[1], attempt=1)
        with pytest.raises(CompletionRefused, match="another attempt"):
            await notes.acknowledge("b1", [batch[0], wrong, batch[2]])
        assert len((await notes.unacknowledged())[1]) == 3
        assert await notes.acknowledge("b1", batch)


async def test_an_attempt_whose_result_the_run_never_got_is_followed_by_one_that_finds_its_session(
    tmp_path: Path,
) -> None:
    ledger, newer = tmp_path / "effects", Claim(2, 1)
    async with host(ledger=ledger, replayable=False) as running, using(running.transport()) as notes:
        await notes.start(SESSION, ONE, b"", 0)
        made = await notes.call(SESSION, ONE, request(0, 0))
        lost = await notes.complete(SESSION, ONE, RESULT, *LINEAGE)
        assert await notes.claim(SESSION, newer) == 1
        assert await notes.standing(SESSION, newer, request(0, 0)) == (Standing.APPLIED, made)
        receipt = await notes.complete(SESSION, newer, RESULT, *LINEAGE)
        with pytest.raises(CompletionRefused):
            await notes.acknowledge("b1", [owed(lost)])
        assert await notes.acknowledge("b1", [owed(receipt, newer)])
        assert effects(ledger) == {f"{SESSION}.0.0": 1}


async def test_what_nobody_will_acknowledge_is_forgotten_when_the_run_says_so() -> None:
    async with host() as running, using(running.transport()) as notes:
        await notes.start(SESSION, ONE, b"", 0)
        await notes.complete(SESSION, ONE, RESULT, *LINEAGE)
        _, results = await notes.unacknowledged()
        await notes.forget([one.receipt.session for one in results])
        assert not (await notes.unacknowledged())[1]
        assert not running.core.sessions.whole()


async def test_an_obligation_to_a_process_that_is_gone_is_refused_by_the_next_one() -> None:
    async with HostProcess() as process, using(process.transport()) as notes:
        await notes.start(SESSION, ONE, b"", 0)
        receipt = await notes.complete(SESSION, ONE, RESULT, *LINEAGE)
        assert receipt is not None
        await process.kill()
        async with using(Transport(process.url, "notes", patience_s=0.2)) as hasty:
            with pytest.raises(HostUnreachable):  # not answering is not gone
                await hasty.acknowledge(receipt.boot, [owed(receipt)])
        await process.again()
        assert not await notes.acknowledge(receipt.boot, [owed(receipt)])


# ---------------------------------------------------------------------- who may ask, and whom


async def test_a_host_with_a_token_answers_only_who_brings_it(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    caplog.set_level("DEBUG")
    monkeypatch.setenv("RIGHT", "sesame-1")
    monkeypatch.setenv("WRONG", "sesame-2")
    async with host(token="sesame-1") as running:
        for name in ("", "WRONG"):
            async with using(running.transport(token_env=name)) as notes:
                with pytest.raises(AccessRefused) as refused:
                    await notes.start(SESSION, ONE, b"", 0)
                assert "sesame" not in str(refused.value)
        async with using(running.transport(token_env="RIGHT")) as notes:
            await notes.start(SESSION, ONE, b"", 0)
            with pytest.raises(ResourceInvalid):
                await notes.call(SESSION, ONE, request(0, 5))
        async with using(running.transport(token_env="MISSING")) as notes:
            with pytest.raises(ConfigurationRefused, match="MISSING"):
                await notes.start(SESSION, ONE, b"", 0)
        async with ClientSession() as session, session.post(running.url + "/v1/control/status", data=b"") as answer:
            assert answer.status == 401
    assert "sesame" not in caplog.text


async def test_unknown_versions_fields_and_names_are_refused_before_anything_is_done() -> None:
    bodies = {
        b'{"schema_version":2,"session":"s","claim":{"incarnation":1,"attempt":0}}': "SchemaUnsupported",
        b'{"session":"s","claim":{"incarnation":1,"attempt":0}}': "SchemaUnsupported",
        b'{"schema_version":1,"session":"s","claim":{"incarnation":1,"attempt":0},"new":1}': "MessageInvalid",
        b'{"schema_version":1,"session":"../s","claim":{"incarnation":1,"attempt":0}}': "MessageInvalid",
    }
    async with host() as running, ClientSession() as session:
        for body, error in bodies.items():
            async with session.post(running.url + "/v1/sessions/claim", data=body) as answer:
                said = await answer.json()
                assert (answer.status, said["error"], said["instance"]["boot"]) == (400, error, "b1")


async def test_another_host_at_the_address_is_not_taken_for_the_right_one() -> None:
    async with host("other") as running, using(Transport(running.url, "notes")) as notes:
        with pytest.raises(ConfigurationRefused):
            await notes.start(SESSION, ONE, b"", 0)
        with pytest.raises(ConfigurationRefused):  # and nobody's obligations expire for it
            await notes.acknowledge("b1", [])


async def test_a_host_that_saves_nothing_is_refused() -> None:
    async with host(mode=CheckpointMode.RESTART_ONLY) as running, using(running.transport()) as notes:
        with pytest.raises(ConfigurationRefused):
            await notes.start(SESSION, ONE, b"", 0)


@pytest.mark.parametrize("url", ["ftp://a", "127.0.0.1:1", "http://user:key@a", "http://a?token=x", "http://"])
def test_an_url_that_is_none_or_has_keys_in_it_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationRefused) as refused:
        Transport(url, "notes")
    assert "key" not in refused.value.found


def test_a_ledger_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationRefused):
        EffectLedger(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [("--token-env", "NOT_SET"), ("--session", "gpu:Nothing"), ("--ledger", "/no/such/folder/file")],
)
async def test_a_host_that_cannot_start_says_why_in_one_line(option: str, value: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gpu.environments.participants.host", option, value), stderr=asyncio.subprocess.PIPE
    )
    _, said = await asyncio.wait_for(process.communicate(), 50)
    assert (process.returncode, len(said.splitlines())) == (2, 1)
    assert value.encode() in said
