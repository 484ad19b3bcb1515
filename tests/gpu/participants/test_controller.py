"""Checkpoints over several hosts: one moment for all of them, and every host open again whatever happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from gpu.environments.participants import wire
from gpu.environments.participants.capabilities import Component
from gpu.environments.participants.client import HttpHost
from gpu.environments.participants.controller import Controller
from gpu.environments.participants.errors import (
    CheckpointBlocked,
    CheckpointConflict,
    CompletionRefused,
    HostFailed,
    HostUnreachable,
    ResumeOwed,
    StaleCheckpoint,
)
from gpu.environments.participants.manifest import Checkpoint, manifest_digest
from gpu.environments.participants.protocol import Operation, Phase
from gpu.environments.participants.transport import Transport
from gpu.environments.resources import Claim, Request, canonical, opened
from gpu.environments.sessions import Session
from storage.clock import SystemClock, VirtualClock
from storage.errors import (
    ArtifactCorrupt,
    DeadlineExceeded,
    FingerprintMismatch,
    RestoreNotFresh,
    RestoreRefused,
    TidegateError,
)
from tests.gpu.participants.hosts import ONE, SESSION, Proxy, Running, host, owed, proxied, request

NAMES = {"policy": Component.MODEL, "coder": Component.AGENT, "shell": Component.RESOURCE}


def soon(seconds: float = 5.0) -> float:
    return time.time() + seconds


class Noted(Transport):
    """Writes down what it is asked, in the order in which it is."""

    said: list[str]

    async def ask(self, path: str, message: Any, kind: Any, *, patience_s: float | None = None) -> Any:
        if path.startswith("control/"):
            self.said.append(f"{path.removeprefix('control/')} {self.name}")
        return await super().ask(path, message, kind, patience_s=patience_s)


class Trio:
    """A model, an agent and a resource, each behind a proxy, and their controller."""

    def __init__(self) -> None:
        self.hosts: dict[str, Running] = {}
        self.proxies: dict[str, Proxy] = {}
        self.controller: Controller
        self.said: list[str] = []

    @property
    def phases(self) -> set[Phase]:
        return {one.phase for one in self.hosts.values()}

    async def use(self, session: str = SESSION, times: int = 1, claim: Claim = ONE) -> None:
        """Begin a session on each host and count; once more on each than on the one before."""
        for more, running in enumerate(self.hosts.values()):
            await running.core.sessions.begin(session, claim, b"", 0, first=True)
            for revision in range(times + more):
                asked = Request(f"{session}.0.{revision}", "add", canonical({"by": 1}), revision)
                await running.core.sessions.call(session, claim, asked)

    async def save(self, checkpoint: str = "c1") -> Checkpoint:
        await self.controller.prepare(checkpoint, soon())
        saved = await self.controller.commit(checkpoint, soon())
        await self.controller.resume(checkpoint)
        return saved


@asynccontextmanager
async def trio(names: dict[str, Component] = NAMES, **more: Any) -> AsyncGenerator[Trio]:
    async with AsyncExitStack() as stack:
        made = Trio()
        transports: list[Transport] = []
        for name, component in names.items():
            running = made.hosts[name] = await stack.enter_async_context(host(name, component=component, **more))
            proxy = made.proxies[name] = await stack.enter_async_context(proxied(running))
            transport = Noted(proxy.url, name, timeout_s=5.0)
            transport.said = made.said
            stack.push_async_callback(transport.close)
            transports.append(transport)
        made.controller = Controller(transports, SystemClock(), release_s=0.5)
        await made.controller.discover()
        yield made


# ---------------------------------------------------------------------- saving


async def test_hosts_are_prepared_agents_after_models_and_resumed_agents_last() -> None:
    async with trio() as three:
        await three.save()
        assert three.said == [
            *("prepare policy", "prepare coder", "prepare shell"),
            *("commit policy", "commit coder", "commit shell"),
            *("resume shell", "resume policy", "resume coder"),
        ]
        assert three.phases == {Phase.IDLE}


async def test_a_saved_checkpoint_goes_on_in_fresh_hosts_with_its_receipts() -> None:
    async with trio() as old:
        await old.use()
        saved = await old.save()
        found = [(one.name, *(entry.revision for entry in one.entries)) for one in saved.manifests]
        assert found == [("coder", 2), ("policy", 1), ("shell", 3)]
        assert msgspec.json.decode(msgspec.json.encode(saved), type=Checkpoint) == saved, "it can be stored"
    async with trio(boot="b2") as new:
        await new.controller.restore("r1", saved, soon())
        assert new.phases == {Phase.RESTORED}
        await new.controller.resume("r1")
        shell = HttpHost(new.hosts["shell"].transport())
        assert await shell.claim(SESSION, Claim(2, 1)) == 3
        again = await shell.call(SESSION, Claim(2, 1), request(2, 2, by=1))
        assert (opened(again.content), again.revision) == (3, 3), "a request of before is known by its receipt"
        assert opened((await shell.call(SESSION, Claim(2, 1), request(3, 3))).content) == 4
        await shell.close()


async def test_requests_wait_while_a_host_is_closed_and_go_on_after() -> None:
    async with host(name="shell") as running:
        shell = HttpHost(running.transport())
        await shell.start(SESSION, ONE, b"", 0)
        controller = Controller([running.transport()], SystemClock())
        await controller.discover()
        await controller.prepare("c1", soon())
        waiting = asyncio.create_task(shell.call(SESSION, ONE, request(0, 0)))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        saved = await controller.commit("c1", soon())
        assert saved.manifests[0].entries[0].revision == 0
        await controller.resume("c1")
        assert (await waiting).revision == 1
        await shell.close()


class Hangs(Session):
    """Until it is let go."""

    let_go = asyncio.Event()

    def __init__(self, task: bytes, seed: int) -> None:
        self._task = task

    async def handle(self, operation: str, arguments: dict[str, Any]) -> Any:
        await type(self).let_go.wait()
        return self._task.decode()

    def export_state(self) -> bytes:
        return self._task


async def test_a_hung_request_fails_one_prepare_and_the_next_checkpoint_succeeds() -> None:
    Hangs.let_go = asyncio.Event()
    async with trio(make=Hangs) as three:
        await three.hosts["shell"].core.sessions.begin(SESSION, ONE, b"", 0, first=True)
        shell = HttpHost(three.hosts["shell"].transport())
        hung = asyncio.create_task(shell.call(SESSION, ONE, request(0, 0)))
        await asyncio.sleep(0.1)
        deadline = soon(0.5)
        with pytest.raises((DeadlineExceeded, StaleCheckpoint)):
            await three.controller.prepare("c1", deadline)
        assert time.time() < deadline + 0.4
        assert (three.phases, three.controller.owed) == ({Phase.IDLE}, {})
        Hangs.let_go.set()
        await hung
        assert (await three.save("c2")).manifests[2].entries[0].revision == 1
        await shell.close()


async def test_a_session_of_unknown_effect_blocks_a_checkpoint_until_it_is_ended() -> None:
    async with trio() as three:
        shell = HttpHost(three.hosts["shell"].transport())
        await shell.start(SESSION, ONE, b"", 0)
        with pytest.raises(HostFailed):
            await shell.call(SESSION, ONE, request(0, 0, "fail"))
        with pytest.raises(CheckpointBlocked, match=SESSION):
            await three.controller.prepare("c1", soon())
        assert three.phases == {Phase.IDLE}
        await shell.end(SESSION)
        await three.save("c2")
        await shell.close()


async def test_a_result_that_is_not_acknowledged_is_waited_for_and_else_blocks() -> None:
    async with trio() as three:
        coder = HttpHost(three.hosts["coder"].transport())
        await coder.start(SESSION, ONE, b"", 0)
        receipt = await coder.complete(SESSION, ONE, b"{}", "g0/0~0", "g0/0~0.1")
        with pytest.raises((DeadlineExceeded, StaleCheckpoint)):
            await three.controller.prepare("c1", soon(0.3))
        preparing = asyncio.create_task(three.controller.prepare("c2", soon()))
        await asyncio.sleep(0.1)
        assert not preparing.done()
        await coder.acknowledge("b1", [owed(receipt)])
        await preparing
        await three.controller.resume("c2")
        with pytest.raises(CompletionRefused):
            await coder.start(SESSION, ONE, b"", 0)
        await coder.close()


# ---------------------------------------------------------------------- lost replies and dead controllers


@pytest.mark.parametrize("operation", ["prepare", "commit", "resume"])
async def test_an_operation_whose_reply_is_lost_is_repeated_with_the_same_id(operation: str) -> None:
    async with trio() as three:
        await three.use()
        for proxy in three.proxies.values():
            proxy.lost[f"control/{operation}"] = 2
        assert len((await three.save()).manifests) == 3
        assert three.phases == {Phase.IDLE}


async def test_a_host_whose_prepare_never_answers_is_resumed_all_the_same() -> None:
    async with trio() as three:
        three.proxies["coder"].lost["control/prepare"] = 10**6
        with pytest.raises((HostUnreachable, DeadlineExceeded)):
            await three.controller.prepare("c1", soon(0.5))
        assert "resume coder" in three.said
        assert "resume policy" in three.said
        assert "prepare shell" not in three.said
        assert (three.phases, three.controller.owed) == ({Phase.IDLE}, {})


async def test_a_prepare_that_arrives_after_its_resume_closes_nothing() -> None:
    async with trio() as three:
        shell = three.hosts["shell"].transport()
        await shell.ask("control/resume", wire.Release(checkpoint="c1"), wire.Controlled)
        with pytest.raises(StaleCheckpoint):
            await shell.ask("control/prepare", wire.Control(checkpoint="c1", deadline=soon()), wire.Controlled)
        assert three.phases == {Phase.IDLE}
        await shell.close()


async def test_one_of_three_that_cannot_be_resumed_keeps_the_next_checkpoint_back_and_not_the_others() -> None:
    async with trio() as three:
        await three.controller.prepare("c1", soon())
        await three.controller.commit("c1", soon())
        three.proxies["policy"].kept["control/resume"] = 10**6
        with pytest.raises(ResumeOwed, match="policy"):
            await three.controller.resume("c1")
        phases = {name: running.phase for name, running in three.hosts.items()}
        assert phases == {"policy": Phase.COMMITTED, "coder": Phase.IDLE, "shell": Phase.IDLE}
        assert three.controller.owed == {"policy": "c1"}
        with pytest.raises(ResumeOwed):
            await three.controller.prepare("c2", soon())
        three.proxies["policy"].kept.clear()
        await three.controller.resume("c1")
        await three.save("c2")


async def test_a_rollback_that_fails_keeps_the_id_and_is_repeated() -> None:
    async with trio() as three:
        three.proxies["coder"].lost["control/prepare"] = 10**6
        three.proxies["policy"].kept["control/resume"] = 10**6
        with pytest.raises((HostUnreachable, DeadlineExceeded)) as failed:
            await three.controller.prepare("c1", soon(0.5))
        assert three.controller.owed == {"policy": "c1"}
        assert any("resume_owed" in note for note in failed.value.__notes__)
        three.proxies["policy"].kept.clear()
        await three.controller.resume("c1")
        three.proxies["coder"].lost.clear()
        await three.save("c2")


@pytest.mark.parametrize("committed", [False, True])
async def test_hosts_of_a_dead_controller_open_by_themselves_and_a_late_commit_publishes_nothing(
    committed: bool,
) -> None:
    clock = VirtualClock(time.time())
    async with trio(clock=clock) as three:
        await three.use()
        await three.controller.prepare("c1", clock.wall() + 30)
        if committed:
            await three.controller.commit("c1", clock.wall() + 30)
        shell = three.hosts["shell"].transport()
        waiting = asyncio.create_task(shell.change("sessions/start", _start("run/g7/0~0"), wire.Answer))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        clock.advance(30)
        await waiting
        assert three.phases == {Phase.IDLE}
        with pytest.raises(StaleCheckpoint):
            await shell.ask(
                "control/commit", wire.Control(checkpoint="c1", deadline=clock.wall() + 30), wire.Controlled
            )
        with pytest.raises(StaleCheckpoint):
            await shell.ask("control/export", wire.Fetch(checkpoint="c1", session=SESSION), wire.Saved)
        await shell.close()


def _start(session: str) -> wire.Start:
    return wire.Start(session=session, claim=wire.Held(incarnation=1, attempt=0), task=b"", seed=0, first=True)


async def test_of_two_controllers_the_second_is_refused_and_cannot_open_what_the_first_closed() -> None:
    async with trio() as three:
        second = Controller([one.transport() for one in three.hosts.values()], SystemClock())
        await second.discover()
        await three.controller.prepare("c1", soon())
        with pytest.raises(CheckpointConflict):
            await second.prepare("c2", soon())
        assert three.phases == {Phase.PREPARED}
        await three.controller.commit("c1", soon())
        await three.controller.resume("c1")
        await three.controller.resume("c1")
        with pytest.raises(StaleCheckpoint):
            await three.controller.prepare("c1", soon())
        for transport in second._transports:
            await transport.close()


# ---------------------------------------------------------------------- restoring


def _altered_manifest(saved: Checkpoint, **changes: Any) -> Checkpoint:
    first = msgspec.structs.replace(saved.manifests[0], **changes)
    return msgspec.structs.replace(saved, manifests=(first, *saved.manifests[1:]))


def _sealed(saved: Checkpoint, **changes: Any) -> Checkpoint:
    made = _altered_manifest(saved, **changes)
    return _altered_manifest(made, digest=manifest_digest(made.manifests[0]))


def _entry(saved: Checkpoint, **changes: Any) -> tuple[wire.Entry, ...]:
    return (msgspec.structs.replace(saved.manifests[0].entries[0], **changes),)


ALTERED = {
    "a flipped byte": (
        lambda s: msgspec.structs.replace(s, exports=((s.exports[0][0][:-1] + b"?",), *s.exports[1:])),
        ArtifactCorrupt,
    ),
    "an export of another host": (
        lambda s: msgspec.structs.replace(s, exports=(s.exports[0], s.exports[2], s.exports[1])),
        ArtifactCorrupt,
    ),
    "a manifest edited": (lambda s: _altered_manifest(s, entries=_entry(s, revision=9)), ArtifactCorrupt),
    "a manifest without digest": (lambda s: _altered_manifest(s, digest=""), ArtifactCorrupt),
    "another checkpoint's": (lambda s: _sealed(s, checkpoint="c0"), ArtifactCorrupt),
    "another host's name": (lambda s: _sealed(s, name="tester"), FingerprintMismatch),
    "another component": (lambda s: _sealed(s, component="resource"), FingerprintMismatch),
    "one missing": (lambda s: msgspec.structs.replace(s, manifests=s.manifests[1:], exports=s.exports[1:]),
                    FingerprintMismatch),
    "one twice": (lambda s: msgspec.structs.replace(s, manifests=(*s.manifests, s.manifests[0]),
                                                    exports=(*s.exports, s.exports[0])), FingerprintMismatch),
    "another topology": (lambda s: msgspec.structs.replace(s, fingerprint="0" * 64), FingerprintMismatch),
}  # fmt: skip


@pytest.mark.parametrize("what", list(ALTERED))
async def test_an_altered_checkpoint_is_detected_before_any_host_is_asked(what: str) -> None:
    alter, error = ALTERED[what]
    async with trio() as old:
        await old.use()
        saved = await old.save()
    async with trio() as new:
        with pytest.raises(error):
            await new.controller.restore("r1", alter(saved), soon())
        assert not new.said
        await new.controller.restore("r2", saved, soon())
        await new.controller.resume("r2")


async def test_a_host_checks_what_it_is_given_and_loads_all_of_it_or_nothing() -> None:
    async with trio({"shell": Component.RESOURCE}) as old:
        await old.use()
        await old.use("run/g1/0~0", times=2)
        saved = await old.save()
    manifest, exports = saved.manifests[0], saved.exports[0]
    bad = (exports[0], exports[1][:-1] + b"?")
    wrong = msgspec.structs.replace(manifest, entries=(manifest.entries[0], manifest.entries[0]))
    async with host("shell") as running:
        shell = running.transport()
        for index, (given, sent, error) in enumerate(
            [
                (manifest, bad, ArtifactCorrupt),
                (manifest, exports[:1], ArtifactCorrupt),
                (msgspec.structs.replace(manifest, checkpoint="c9"), exports, ArtifactCorrupt),
                (msgspec.structs.replace(wrong, digest=manifest_digest(wrong)), exports, ArtifactCorrupt),
                (_lies(manifest, exports), exports, ArtifactCorrupt),
            ]
        ):
            load = wire.Load(checkpoint=f"r{index}", deadline=soon(), manifest=given, exports=sent)
            with pytest.raises(error):
                await shell.ask("control/restore", load, wire.Controlled)
            assert running.phase is Phase.IDLE
            assert not running.core.sessions.whole()
        same = wire.Load(checkpoint="c1", deadline=soon(), manifest=manifest, exports=exports)
        with pytest.raises(ArtifactCorrupt):  # never under the id that it was saved with
            await shell.ask("control/restore", same, wire.Controlled)
        load = wire.Load(checkpoint="r9", deadline=soon(), manifest=manifest, exports=exports)
        await shell.ask("control/restore", load, wire.Controlled)
        assert sorted(running.core.sessions.whole()) == [SESSION, "run/g1/0~0"]
        await shell.close()


def _lies(manifest: wire.Manifest, exports: tuple[bytes, ...]) -> wire.Manifest:
    """Whole by its digests, with another revision than the session in it has."""
    first = msgspec.structs.replace(manifest.entries[0], revision=7)
    made = msgspec.structs.replace(manifest, entries=(first, *manifest.entries[1:]))
    return msgspec.structs.replace(made, digest=manifest_digest(made))


async def test_a_host_that_has_served_a_session_is_not_restored_and_neither_are_the_others() -> None:
    async with trio() as old:
        await old.use()
        saved = await old.save()
    async with trio() as new:
        shell = HttpHost(new.hosts["shell"].transport())
        await shell.start(SESSION, ONE, b"", 0)
        await shell.end(SESSION)
        with pytest.raises(RestoreNotFresh):
            await new.controller.restore("r1", saved, soon())
        assert new.phases == {Phase.IDLE}
        assert not any(running.core.sessions.whole() for running in new.hosts.values())
        await shell.close()


@pytest.mark.parametrize("how", ["abort", "lease"])
async def test_what_was_restored_and_not_resumed_is_dropped_and_can_be_restored_again(how: str) -> None:
    async with trio() as old:
        await old.use()
        saved = await old.save()
    clock = VirtualClock(time.time())
    async with trio(clock=clock) as new:
        await new.controller.restore("r1", saved, clock.wall() + 30)
        if how == "abort":
            await new.controller.abort("r1")
        else:
            clock.advance(30)
            assert new.phases == {Phase.IDLE}
            with pytest.raises(RestoreRefused):
                await new.controller.resume("r1")
        assert new.phases == {Phase.IDLE}
        assert not any(running.core.sessions.whole() for running in new.hosts.values())
        assert new.controller.owed == {}
        await new.controller.restore("r2", saved, clock.wall() + 5)
        await new.controller.resume("r2")
        assert [await running.count() for running in new.hosts.values()] == [1, 2, 3]


async def test_one_host_that_lost_what_it_restored_keeps_the_others_from_opening_with_it() -> None:
    async with trio() as old:
        await old.use()
        saved = await old.save()
    async with trio() as new:
        await new.controller.restore("r1", saved, soon())
        new.hosts["coder"].core.control.end(Operation.ABORT, "r1")
        with pytest.raises(RestoreRefused):
            await new.controller.resume("r1")
        assert not any(running.core.sessions.whole() for running in new.hosts.values())
        assert (new.phases, new.controller.owed) == ({Phase.IDLE}, {})


async def test_errors_of_a_restore_are_typed_all_the_way() -> None:
    async with trio() as three:
        empty = await three.save()
        with pytest.raises(TidegateError):
            await three.controller.restore("c1", empty, soon())
        await three.controller.restore("r1", empty, soon())
        await three.controller.resume("r1")
