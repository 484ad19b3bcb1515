"""The process that publishes a trainer's checkpoints: hashes and uploads from the trainer's own memory.

    python -m storage.publisher_child SOCKET TRAINER_PID URL

Started by `storage.publisher_process`, which gives it its end of the socket. It ends with the trainer, whatever ends
that, and may itself be killed at any moment: every object is whole or not there, and named by its content. A fault that
is no error of ours ends it too, with a traceback on stderr.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
import threading
import time

from storage.capture import Capture
from storage.errors import TidegateError
from storage.host_memory import MappedMemory
from storage.opening import open_store
from storage.publisher import Progress, ThreadPublisher
from storage.publisher_wire import Advanced, Failed, Publish, Published, Wire

LOOK_S = 0.1


def serve(wire: Wire, url: str) -> None:
    """Publish what is asked for, until the other end is closed."""

    def tell(progress: Progress) -> None:
        wire.send(Advanced(*progress))

    publisher: ThreadPublisher | None = None
    while True:
        message, fd = wire.receive()
        assert isinstance(message, Publish)
        assert fd is not None, "the memory comes with the message"
        try:
            publisher = publisher or ThreadPublisher(open_store(url), tell)
            written = publisher.publish(message.run, message.incarnation, _capture(message, fd), message.newest)
            answer = Published(*written)
        except TidegateError as error:
            answer = Failed.of(error)
        wire.send(answer)
        gc.collect()  # what an S3 client leaves in cycles would keep the memory mapped


def _capture(message: Publish, fd: int) -> Capture:
    memory = MappedMemory(fd, message.layout.size)
    return Capture(
        message.step,
        message.state_digest,
        message.weights_digest,
        message.meta,
        message.digests,
        message.layout,
        memory,
    )


def end_with(trainer: int) -> None:
    """Returns never: ends this process soon after its parent is gone. The socket alone would not tell while another
    process that the trainer forked still holds a copy of its end, nor does a publication look at it."""
    while os.getppid() == trainer:
        time.sleep(LOOK_S)
    os._exit(1)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    end, trainer, url = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    threading.Thread(target=end_with, args=(trainer,), daemon=True).start()
    with contextlib.suppress(EOFError):
        serve(Wire(socket.socket(fileno=end)), url)


if __name__ == "__main__":
    main()
