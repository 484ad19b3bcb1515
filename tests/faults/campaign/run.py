"""One run of a campaign: a driver process that is started again like a retried flow run, faults on time, the proof."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import msgspec

from flows.config import RunConfig
from storage.checkpoint import read_manifest
from storage.filesystem import Store
from storage.history import read_all
from storage.journal import fold_segment
from storage.ledger import Ledger
from storage.runs import RunPaths
from storage.schema import CheckpointPublished
from storage.verify import Report, verify
from tests.faults.campaign import driver
from tests.faults.campaign.driver import FENCED, FINISHED, LOST, STORE
from tests.faults.campaign.places import LocalPlace, S3Place
from tests.faults.campaign.plan import Event, Plan
from tests.faults.proxy import Fault

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.faults.campaign.driver"])  # its imports take longer than most attempts
MARK = "TIDEGATE_CAMPAIGN"
ACTORS = {"manager": "Manager", "trainer": "Trainer", "engine": "Engine", "worker": "Worker"}
LIMIT_S = 420.0
EFFECTS = {"claims": "run_claimed", "reused": "rollouts_reused", "redone": "step_redone",
           "regenerated": "rollouts_regenerated", "continued": "rollouts_continued"}  # fmt: skip


class Broken(AssertionError):
    """The promise was broken, or a process ended in a way nobody planned."""


@dataclass
class Driver:
    """A flow attempt. `said` is what it has said so far."""

    process: ForkServerProcess
    source: Connection
    said: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def start(cls, config: RunConfig, log: Path, attempt: int) -> Driver:
        source, sink = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=driver.main, args=(config, attempt, str(log), sink))
        process.start()
        sink.close()
        return cls(process, source)

    def listen(self) -> list[dict[str, Any]]:
        """What it has said since the last time."""
        found: list[dict[str, Any]] = []
        with contextlib.suppress(EOFError, OSError):  # the end, or a line that a kill has cut
            while self.source.poll():
                found.append(msgspec.json.decode(self.source.recv_bytes()))
        self.said += found
        return found

    def wait(self, seconds: float) -> int:
        """Its exit code. Raises `Broken`."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            raise Broken(f"a driver did not end in {seconds:.0f} s: {self.said[-1:]}")
        return self.process.exitcode

    def signal(self, number: signal.Signals) -> None:
        if self.process.pid is not None:
            _send(self.process.pid, number)


@dataclass
class Run:
    """`hits` counts what was really done, by kind; `struck` says when (Unix seconds), `resumed` counts attempts
    that went on with the run after a fault, by its kind."""

    plan: Plan
    place: LocalPlace | S3Place
    config: RunConfig
    log: Path
    hits: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    zombies: list[Driver] = field(default_factory=list)
    waking: list[threading.Timer] = field(default_factory=list)
    struck: list[tuple[float, str]] = field(default_factory=list)
    resumed: Counter[str] = field(default_factory=Counter)
    latest: str = ""
    step: int = 0

    def __post_init__(self) -> None:
        self.direct: Store = self.place.direct(self.config.run)
        self.began = time.monotonic()

    # ------------------------------------------------------------------ the flow run and its retries

    def go(self) -> Report:
        """Drive the run to its end through all events of its plan. Raises `Broken`."""
        self.driver = Driver.start(self.config, self.log, 1)
        events = list(self.plan.events)
        try:
            while not self._ended():
                if time.monotonic() - self.began > LIMIT_S:
                    raise Broken(f"not finished after {LIMIT_S:.0f} s at step {self.step}; see {self.log}")
                self._listen()
                if events and self.step >= events[0].step:
                    event = events.pop(0)
                    time.sleep(event.delay_s)
                    self._strike(event)
                time.sleep(0.005)
            return self._prove()
        finally:
            for timer in self.waking:
                timer.cancel()
            for one in (self.driver, *self.zombies):
                one.signal(signal.SIGKILL)
                one.wait(10)
            for kind in ACTORS:
                self._signal(kind, signal.SIGKILL)

    def _listen(self) -> None:
        for line in self.driver.listen():
            self.step = max(self.step, line.get("step", 0))
            if line.get("resumed"):
                if self.counts["retries"]:
                    self.resumed[self.latest] += 1
                if line["resumed"]["diverged"]:
                    raise Broken(f"{line['resumed']['diverged']} redone steps came to another state")

    def _ended(self) -> bool:
        code = self.driver.process.exitcode
        if code is None:
            return False
        time.sleep(0.05)
        self._listen()
        if code == FINISHED:
            return True
        self.counts[{LOST: "lost a process", FENCED: "fenced", STORE: "store away"}.get(code, f"exit {code}")] += 1
        if code not in (LOST, STORE, -signal.SIGKILL, FENCED):
            raise Broken(f"the driver ended with {code}: {self.driver.said[-1:]}; see {self.log}")
        self._retry()
        return False

    def _retry(self) -> None:
        self.counts["retries"] += 1
        self.driver = Driver.start(self.config, self.log, 1 + self.counts["retries"])

    # ------------------------------------------------------------------ faults

    def _strike(self, event: Event) -> None:
        strike = {
            "kill": self._kill, "stop": self._stop, "request": self._request, "server-kill": self._server,
            "server-stop": self._server, "full": self._full, "alter": self._alter,
        }[event.what]  # fmt: skip
        kind, began = event.kind.replace("|", " ").strip(), time.time()
        self.latest = kind
        if strike(event):
            self.hits[kind] += 1
            self.struck.append((began, kind))

    def _kill(self, event: Event) -> bool:
        if event.whom == "everything":
            self._kill_everything()
            self._retry()
            return True
        if event.whom == "driver":
            self.driver.signal(signal.SIGKILL)
            return True
        return self._signal(event.whom, signal.SIGKILL, event.part)

    def _kill_everything(self) -> None:
        self.driver.signal(signal.SIGKILL)
        self.driver.wait(10)
        self._listen()
        for kind in ACTORS:
            self._signal(kind, signal.SIGKILL)

    def _stop(self, event: Event) -> bool:
        """SIGSTOP, and SIGCONT later. A stopped driver is retried meanwhile, so that it wakes up as a zombie."""
        if event.whom == "driver":
            zombie = self.driver
            zombie.signal(signal.SIGSTOP)
            self._listen()
            self.zombies.append(zombie)
            self._wake(event.seconds, lambda: zombie.signal(signal.SIGCONT))
            self._retry()
            return True
        pids = pids_of(event.whom)
        if not pids:
            return False
        pid = pids[int(event.part * len(pids))]
        _send(pid, signal.SIGSTOP)
        self._wake(event.seconds, lambda: _send(pid, signal.SIGCONT))
        return True

    def _wake(self, seconds: float, action: Any) -> None:
        timer = threading.Timer(seconds, action)
        timer.start()
        self.waking.append(timer)

    def _signal(self, kind: str, number: signal.Signals, part: float | None = None) -> bool:
        pids = pids_of(kind)
        if part is not None and pids:
            pids = [pids[int(part * len(pids))]]
        sent = [_send(pid, number) for pid in pids]
        return any(sent)

    def _request(self, event: Event) -> bool:
        assert isinstance(self.place, S3Place)
        name, where = event.whom.split("|")
        fault = Fault(name)
        before = self.place.proxy.hits[fault]
        method = "GET" if fault in (Fault.BIT_FLIP, Fault.TRUNCATED) else ".*"
        rule = self.place.proxy.add(
            fault, method, where if method != "GET" else "", times=event.times, hold_s=event.seconds,
            delay_s=event.seconds,
        )  # fmt: skip
        deadline = time.monotonic() + 4.0
        while rule.times and time.monotonic() < deadline and self.driver.process.exitcode is None:
            self._listen()
            time.sleep(0.01)
        rule.times = 0
        met = self.place.proxy.hits[fault] - before
        self.counts["requests met"] += met
        return met > 0

    def _server(self, event: Event) -> bool:
        assert isinstance(self.place, S3Place)
        if event.what == "server-kill":
            self.place.restart()
            return True
        self.place.signal(signal.SIGSTOP)
        time.sleep(event.seconds)
        self.place.signal(signal.SIGCONT)
        return True

    def _full(self, event: Event) -> bool:
        assert isinstance(self.place, LocalPlace)
        try:
            if not self.place.fill():
                return False
            time.sleep(event.seconds)
            return True
        finally:
            self.place.free()

    # ------------------------------------------------------------------ altered bytes

    def _alter(self, event: Event) -> bool:
        """Everything is dead; one object is altered. `verify` must find it, and a restart must refuse it, or take an
        older checkpoint, before it has changed anything; then the bytes are put back and the run goes on."""
        self._kill_everything()
        what, how = event.whom.split()
        key = self._target(what, event.part, how)
        if key is None:
            self._retry()
            return False
        whole = self.direct.read(key)
        self.direct.delete([key])
        if how != "remove":
            self.direct.create(key, _altered(whole, how, event.part))
        if verify(self.direct, self.config.run).sound:
            raise Broken(f"verify did not find {key} altered by {how}")
        before = set(self.direct.list(RunPaths(self.config.run).journal))
        self._refuse_or_reject(what, before, key)
        self.direct.delete([key])
        self.direct.create(key, whole)
        if what == "journal":
            self._retry()
        self.counts["alterations detected"] += 1
        return True

    def _refuse_or_reject(self, what: str, before: set[str], key: str) -> None:
        self._retry()
        if what == "journal":
            code = self.driver.wait(120)
            time.sleep(0.05)
            self._listen()
            if code not in (1, 2) or set(self.direct.list(RunPaths(self.config.run).journal)) - {key} != before - {key}:
                raise Broken(f"a run with altered {key} was not refused untouched: {code}, {self.driver.said[-1:]}")
            return
        deadline = time.monotonic() + 120
        while not (found := [line["resumed"] for line in self.driver.said if line.get("resumed")]):
            self._listen()
            time.sleep(0.01)
            if time.monotonic() > deadline or self.driver.process.exitcode is not None:
                raise Broken(f"a run with altered {key} did not resume from elsewhere: {self.driver.said[-1:]}")
        if not found[0]["rejected"]:
            raise Broken(f"altered {key} was not rejected: {found[0]}")

    def _target(self, what: str, part: float, how: str) -> str | None:
        """A segment that a restore reads, so none before the newest ledger snapshot (and never the last one when it is
        removed: that looks like an earlier end), or an object of the newest checkpoint."""
        paths = RunPaths(self.config.run)
        segments = list(read_all(self.direct, self.config.run))
        if what == "journal":
            newest = segments[-1].header.snapshot if segments else None
            first, last = newest.slot if newest else 0, len(segments) - (how == "remove")
            return paths.segment(first + int(part * (last - first))) if last > first else None
        records = [row.record for segment in segments for row in segment.rows]
        newest = next((one for one in reversed(records) if isinstance(one, CheckpointPublished)), None)
        if newest is None:
            return None
        manifest = read_manifest(self.direct, self.config.run, newest.manifest, newest.digest)
        keys = [paths.manifest(newest.manifest), *(paths.object(digest) for digest in sorted(manifest.objects))]
        return keys[int(part * len(keys))]

    # ------------------------------------------------------------------ proof

    def _prove(self) -> Report:
        for timer in self.waking:
            timer.join(15)
        for zombie in self.zombies:
            code = zombie.wait(60)
            if code not in (FENCED, LOST, -signal.SIGKILL):
                raise Broken(f"a stopped driver that continued ended with {code}")
            self.counts["zombie drivers refused"] += code == FENCED
        report = verify(self.direct, self.config.run)
        if not report.sound or report.lost or report.trained_twice or report.unsettled:
            raise Broken(f"{report.problems[:2]} {report}")
        if report.handed_out != report.consumed + report.discarded + report.quarantined or report.quarantined:
            raise Broken(f"the final states do not add up: {report}")
        if not report.finished:
            raise Broken("not finished")
        return report


def effects(store: Store, run: str, num_siblings: int, struck: list[tuple[float, str]]) -> dict[str, Counter[str]]:
    """What the journal counted between each fault and the next, by the kind of the fault: claims, and rollouts and
    steps that were reused, redone, generated again or continued."""
    found: dict[str, Counter[str]] = {kind: Counter() for _, kind in struck}
    ledger, before = Ledger(num_siblings), Counter[str]()
    for segment in read_all(store, run):
        fold_segment(ledger, segment)
        kinds = [kind for when, kind in struck if when <= segment.rows[0].time]
        if kinds:
            grown = {name: ledger.counts[key] - before[key] for name, key in EFFECTS.items()}
            found[kinds[-1]].update(grown)
        before = Counter(ledger.counts)
    return found


def pids_of(kind: str) -> list[int]:
    """Living actor processes of a kind that were started by this campaign's Ray."""
    mark = f"{MARK}={os.environ[MARK]}\0".encode()
    title = f"ray::{ACTORS[kind]}Actor".encode()
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(title) and mark in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return sorted(found)


def _send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
        return True
    except ProcessLookupError:
        return False


def _altered(whole: bytes, how: str, part: float) -> bytes:
    if how == "truncate":
        return whole[: int(part * len(whole))]
    at = int(part * len(whole))
    return whole[:at] + bytes([whole[at] ^ (1 << (at % 8))]) + whole[at + 1 :]
