"""Real S3 servers for tests, each a process of its own on loopback, started and stopped by process id."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray

from flows.seaweed import S3Server, create_bucket, stop
from flows.settings import RAY
from flows.stack import free_port, tool

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def process(command: list[str], log: Path, environment: Mapping[str, str]) -> Generator[subprocess.Popen[bytes]]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as out:
        one = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=out, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    try:
        yield one
    finally:
        stop(one)


def alive(one: subprocess.Popen[bytes], log: Path) -> None:
    assert one.poll() is None, log.read_text(errors="replace")[-1000:]


@contextlib.contextmanager
def moto(folder: Path) -> Generator[S3Server]:
    """The moto server: in memory, an implementation of its own; it checks neither signatures nor checksums."""
    port = free_port()
    server = S3Server(f"http://127.0.0.1:{port}", "testing", "testing")
    log = folder / "moto.log"
    with process([tool("moto_server"), "-H", "127.0.0.1", "-p", str(port)], log, server.environment) as one:
        create_bucket(server, lambda: alive(one, log))
        yield server


@contextlib.contextmanager
def rclone(folder: Path) -> Generator[S3Server]:
    """`rclone serve s3`: accepts conditional headers and ignores them."""
    port = free_port()
    server = S3Server(f"http://127.0.0.1:{port}", "rclonekey", "rclonesecret")
    (folder / "data").mkdir(parents=True)
    command = [
        tool("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{server.key},{server.secret}",
        "--config", "/dev/null", str(folder / "data"),
    ]  # fmt: skip
    log = folder / "rclone.log"
    with process(command, log, {}) as one:
        create_bucket(server, lambda: alive(one, log))
        yield server


@contextlib.contextmanager
def deaf() -> Generator[str]:
    """An endpoint that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def ray_instance(**options: Any) -> Generator[str]:
    """Ray on loopback, its processes importing this tree; yields the address."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in RAY:
            patch.setenv(variable.name, variable.value)
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        context = ray.init(include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1", **options)
        try:
            yield str(context.address_info["gcs_address"])
        finally:
            ray.shutdown()
