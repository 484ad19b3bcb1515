"""Where a campaign's runs are stored, and what can be done to that place: local files, or SeaweedFS behind a proxy."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Generator
from pathlib import Path

from flows.seaweed import Plan, create_bucket, exported, plan_seaweed, start_seaweed, stop
from flows.stack import tool
from storage.filesystem import Store
from storage.opening import open_store
from tests.faults.proxy import Proxy, proxied


class LocalPlace:
    """A folder on a small file system of its own, which can be filled up; an ordinary one where that is not allowed."""

    name = "local"

    def __init__(self, folder: Path, small: bool) -> None:
        self.folder, self.small = folder, small
        self.ballast = folder / ".ballast"

    def url(self, run: str) -> str:
        return str(self.folder / run)

    def direct(self, run: str) -> Store:
        return open_store(self.url(run))

    def fill(self) -> bool:
        """Leave no room; False where that cannot be done without harm to others."""
        if not self.small:
            return False
        with open(self.ballast, "wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while file.write(b"\0" * size):
                        continue
        return True

    def free(self) -> None:
        self.ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def local_place(root: Path) -> Generator[LocalPlace]:
    folder = root / "local"
    folder.mkdir(parents=True)
    mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tidegate-faults", str(folder)], capture_output=True, check=False
    ).returncode
    try:
        yield LocalPlace(folder, mounted)
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


class S3Place:
    """`restart` and `signal` act on the server's process; `proxy` on single requests."""

    name = "s3"

    def __init__(self, root: Path, plan: Plan, proxy: Proxy) -> None:
        self.root, self.server, self.proxy, self._plan = root, plan.server, proxy, plan
        self.process: subprocess.Popen[bytes] | None = None
        self._prefix = uuid.uuid4().hex[:6]

    def url(self, run: str) -> str:
        return self.server.url(f"{self._prefix}/{run}", endpoint=self.proxy.endpoint)

    def direct(self, run: str) -> Store:
        return open_store(self.server.url(f"{self._prefix}/{run}"))

    def start(self) -> None:
        self.process = start_seaweed(self._plan, self.root / "weed.log")
        create_bucket(self.server)

    def restart(self) -> None:
        """SIGKILL the server and start it on its data."""
        assert self.process is not None
        self.signal(signal.SIGKILL)
        self.process.wait(10)
        self.start()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, number)


@contextlib.contextmanager
def s3_place(root: Path) -> Generator[S3Place]:
    folder = root / "s3"
    folder.mkdir(parents=True)
    plan = plan_seaweed(folder / "data", tool("weed"))
    with exported(plan.server), proxied(plan.server.endpoint) as proxy:
        place = S3Place(folder, plan, proxy)
        place.start()
        try:
            yield place
        finally:
            if place.process is not None:
                stop(place.process)
            shutil.rmtree(plan.sockets, ignore_errors=True)
