"""What a trainer and its publishing process say to each other, over a pair of connected sockets.

Messages are values; a captured state does not travel, but the descriptor of its memory does. There is no secret in any
of them: a store is named by its url, and the keys come from the environment that both processes have.
"""

from __future__ import annotations

import socket

import msgspec

from storage import errors
from storage.errors import TidegateError
from storage.layout import Layout
from storage.publisher import Newest

_LENGTH_BYTES = 8


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Publish the state that lies, as `layout` says, in the memory whose descriptor comes with this message."""

    run: str
    incarnation: int
    newest: Newest | None
    step: int
    state_digest: str
    weights_digest: str
    meta: str
    digests: dict[str, str]
    layout: Layout


class Advanced(msgspec.Struct, frozen=True, tag=True):
    """Bytes of shards that are in the store, of all."""

    done: int
    size: int


class Published(msgspec.Struct, frozen=True, tag=True):
    """The fields of `Written`."""

    name: str
    digest: str
    size: int
    written: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """An error of `storage.errors`, by the name of its class."""

    kind: str
    found: str
    expected: str
    action: str
    code: str

    @classmethod
    def of(cls, error: TidegateError) -> Failed:
        return cls(type(error).__name__, error.found, error.expected, error.action, error.code)

    def error(self) -> TidegateError:
        kind: type[TidegateError] = getattr(errors, self.kind)
        return kind(self.found, expected=self.expected, action=self.action, code=self.code)


Message = Publish | Advanced | Published | Failed


class Wire:
    """One end. Raises `EOFError` when the other process has closed its end or is gone."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, message: Message, fd: int | None = None) -> None:
        """`fd` stays open here; the other process gets one of its own."""
        data = msgspec.msgpack.encode(message)
        length = len(data).to_bytes(_LENGTH_BYTES, "little")
        try:
            if fd is None:
                self._end.sendall(length)
            else:
                socket.send_fds(self._end, [length], [fd])
            self._end.sendall(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError from error

    def receive(self) -> tuple[Message, int | None]:
        """The next message, and the descriptor that came with it; the caller closes it."""
        try:
            length, fds, _, _ = socket.recv_fds(self._end, _LENGTH_BYTES, 1)
            length += self._exactly(_LENGTH_BYTES - len(length))
            data = self._exactly(int.from_bytes(length, "little"))
        except ConnectionResetError as error:
            raise EOFError from error
        return msgspec.msgpack.decode(data, type=Message), fds[0] if fds else None

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            more = self._end.recv(min(count - len(data), 1 << 20))
            if not more:
                raise EOFError
            data += more
        return bytes(data)

    def close(self) -> None:
        self._end.close()
