"""Publishes checkpoints from a process of its own, so that hashing and uploading never hold up a training step.

The process is started anew, never forked: threads of torch, Ray and an S3 client do not survive a fork. It maps the
capture's memory, so nothing is copied, and it is kept from one checkpoint to the next. When it dies, the publication
under way fails with `UploadLost`, the capture stays as it is, and the next try starts another process.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

from storage.capture import Capture
from storage.checkpoint import Written
from storage.errors import UploadLost
from storage.memory import MemoryStore
from storage.opening import open_store
from storage.publisher import Newest, Progress, Publisher, ThreadPublisher
from storage.publisher_wire import Advanced, Failed, Publish, Published, Wire

END_S = 1.0


def open_publisher(url: str) -> Publisher:
    """A process of its own for the store at `url`; a thread for memory://, whose objects live in this process alone.
    Raises `StorageUnusable` for other schemes."""
    store = open_store(url)
    return ThreadPublisher(store) if isinstance(store, MemoryStore) else PublisherProcess(store.url)


class PublisherProcess:
    """See the module and `Publisher`. The first publication starts the process; it ends with this one, or by
    `close`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._flight = threading.Lock()
        self._running: tuple[subprocess.Popen[bytes], Wire] | None = None
        self.progress = Progress(0, 0)

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        running = self._running
        return running[0].pid if running else None

    def publish(self, run: str, incarnation: int, capture: Capture, newest: Newest | None) -> Written:
        """See `Publisher`."""
        with self._flight:
            process, wire = self._living()
            self.progress = Progress(0, capture.layout.num_bytes)
            try:
                wire.send(_message(run, incarnation, capture, newest), capture.memory.fd)
                answer = self._follow(wire)
            except BaseException as error:
                self._running = None
                wire.close()  # it ends by itself at this, unless it is in the middle of a publication
                code = _end(process)
                if isinstance(error, EOFError):
                    raise _lost(f"ended with {code} in the middle") from error
                raise
        if isinstance(answer, Failed):
            raise answer.error()
        return Written(answer.name, answer.digest, answer.size, answer.written)

    def _living(self) -> tuple[subprocess.Popen[bytes], Wire]:
        if self._running is not None and self._running[0].poll() is not None:
            self._running[1].close()
            self._running = None
        if self._running is None:
            self._running = _start(self._url)
        return self._running

    def _follow(self, wire: Wire) -> Published | Failed:
        while True:
            message, _ = wire.receive()
            if isinstance(message, Advanced):
                self.progress = Progress(message.done, message.size)
                continue
            assert not isinstance(message, Publish), "only a trainer asks"
            return message

    def close(self) -> None:
        """End the process, also in the middle of a publication, which then raises `UploadLost`."""
        running = self._running
        if running is not None:
            running[0].kill()
            running[0].wait()


def _start(url: str) -> tuple[subprocess.Popen[bytes], Wire]:
    ours, theirs = socket.socketpair()
    with theirs:
        end = theirs.fileno()
        command = [sys.executable, "-P", "-m", "storage.publisher_child", str(end), str(os.getpid()), url]
        try:
            process = subprocess.Popen(
                command,
                pass_fds=[end],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                start_new_session=True,  # an interrupt from the keyboard is the trainer's to answer
            )
        except OSError as error:
            ours.close()
            raise _lost(f"could not be started: {error}") from error
    return process, Wire(ours)


def _end(process: subprocess.Popen[bytes]) -> int:
    """Its exit code; one that does not end is killed, it has nothing to clean up."""
    try:
        return process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _lost(what: str) -> UploadLost:
    return UploadLost(
        f"the process that publishes checkpoints {what}",
        expected="a living process",
        action="nothing: the capture is kept, and the next try starts another process",
    )


def _message(run: str, incarnation: int, capture: Capture, newest: Newest | None) -> Publish:
    return Publish(
        run,
        incarnation,
        newest,
        capture.step,
        capture.state_digest,
        capture.weights_digest,
        capture.meta,
        dict(capture.digests),
        capture.layout,
    )
