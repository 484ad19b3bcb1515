"""A whole installation on this machine: Prefect server, worker and Ray cluster, on loopback and free ports, in a folder
of its own. Everything it starts it stops, by process id, also after a failure."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from flows.settings import environment
from storage.errors import ResourceUnavailable

POOL = "local-process"


@dataclass
class Stack:
    """Running services. `env` reaches them; `root` keeps their state and logs."""

    root: Path
    env: dict[str, str]
    api: str
    ray_address: str
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=lambda: {})

    @property
    def ui(self) -> str:
        return self.api.removesuffix("/api")

    def start(self, name: str, command: list[str]) -> None:
        """Start a service in a session of its own; its output goes to <root>/logs/<name>.log."""
        log = self.root / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as out:
            self.processes[name] = subprocess.Popen(
                command,
                env=self.env,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def run(self, command: list[str], timeout: float = 120.0) -> str:
        """Run a command to its end; its output. Raises `ResourceUnavailable` when it fails."""
        done = subprocess.run(
            command,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            raise ResourceUnavailable(
                f"{' '.join(command[-3:])} ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-400:]}",
                expected="exit code 0",
                action=f"look at {self.root / 'logs'}",
            )
        return done.stdout

    def check(self) -> None:
        """Raises `ResourceUnavailable` when a service has ended."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                log = self.root / "logs" / f"{name}.log"
                raise ResourceUnavailable(
                    f"{name} ended with {process.returncode}: {tail(log)}",
                    expected="a running service",
                    action=f"look at {log}",
                )

    def stop(self) -> None:
        """Stop everything: politely, then for good."""
        ending = list(self.processes.values())
        self.processes.clear()
        for sign, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            deadline = time.monotonic() + patience
            for process in ending:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, sign)
            for process in ending:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, deadline - time.monotonic()))


def tail(log: Path, size: int = 300) -> str:
    return log.read_text(errors="replace")[-size:].strip() if log.exists() else ""


def free_port(wanted: int | None = None) -> int:
    """A free loopback port, or the wanted one. Raises `ResourceUnavailable` when that is taken."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", wanted or 0))
        except OSError as error:
            raise ResourceUnavailable(
                f"port {wanted} is in use",
                expected="a free port on 127.0.0.1",
                action="stop what uses it, or choose another port",
            ) from error
        return probe.getsockname()[1]


def tool(name: str) -> str:
    """A program of this Python environment."""
    return str(Path(sys.executable).parent / name)


def wait_until(what: str, ready: Callable[[], bool], seconds: float, stack: Stack) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        stack.check()
        if time.monotonic() > deadline:
            raise ResourceUnavailable(
                f"{what} is not ready after {seconds:.0f} s",
                expected="a ready service",
                action=f"look at {stack.root / 'logs'}",
            )
        time.sleep(0.2)


@contextlib.contextmanager
def running_stack(
    root: Path,
    home: Path,
    say: Callable[[str], None],
    *,
    cpus: int,
    gpus: int = 0,
    port: int | None = None,
    object_store: int = 4 << 30,
) -> Generator[Stack]:
    """Start server, deployments, worker and Ray; stop them at the end, also of a process that is terminated. `home` is
    the project's folder.

    Raises `ResourceUnavailable` for a port in use and for services that do not come up.
    """
    root.mkdir(parents=True, exist_ok=True)
    server_port, ray_port = free_port(port), free_port()
    api = f"http://127.0.0.1:{server_port}/api"
    env = {
        **os.environ,
        **environment(),
        "PREFECT_HOME": str(root / "prefect"),
        "PREFECT_API_URL": api,
        "RAY_ADDRESS": f"127.0.0.1:{ray_port}",
        "TIDEGATE_HOME": str(home),
        "PYTHONUNBUFFERED": "1",
    }
    stack = Stack(root, env, api, env["RAY_ADDRESS"])
    ray_folder = tempfile.mkdtemp(prefix="tg-ray-")  # short: socket paths below it are limited to 107 characters
    try:
        end_politely()
        say("op=stack phase=start what=ray")
        stack.start("ray", [
            tool("ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={ray_port}",
            f"--num-cpus={cpus}", f"--num-gpus={gpus}", "--include-dashboard=false", f"--temp-dir={ray_folder}",
            f"--dashboard-agent-listen-port={free_port()}", f"--object-store-memory={object_store}",
        ])  # fmt: skip
        say(f"op=stack phase=start what=prefect ui=http://127.0.0.1:{server_port}")
        stack.start("server", [tool("prefect"), "server", "start", "--host", "127.0.0.1", "--port", str(server_port)])
        wait_until("the Prefect server", lambda: _healthy(api), 120.0, stack)
        _create_pool(api)
        say("op=stack phase=deploy file=prefect.yaml")
        stack.run([
            tool("prefect"), "--no-prompt", "deploy", "--all", "--prefect-file", str(home / "prefect.yaml"),
        ])  # fmt: skip
        stack.start("worker", [tool("prefect"), "worker", "start", "--pool", POOL, "--name", "local", "--limit", "4"])
        wait_until("Ray", lambda: _listens(ray_port), 60.0, stack)
        yield stack
    finally:
        say("op=stack phase=stop")
        stack.stop()
        shutil.rmtree(ray_folder, ignore_errors=True)


def end_politely() -> None:
    """A terminated process, or one whose terminal closes, stops what it started."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, end)


def _create_pool(api: str) -> None:
    """The work pool of prefect.yaml; one that exists is fine."""
    answer = httpx.post(f"{api}/work_pools/", json={"name": POOL, "type": "process"}, timeout=30.0)
    if answer.status_code not in (201, 409):
        raise ResourceUnavailable(
            f"the server answered {answer.status_code} to the creation of work pool {POOL}: {answer.text[:200]}",
            expected="201, or 409 when it exists",
            action="look at the server's log",
        )


def _healthy(api: str) -> bool:
    try:
        return httpx.get(f"{api}/health", timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
