"""A store on a file system that has hard links and fsync."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import socket
import uuid
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from storage.errors import CommitUnknown, StorageUnusable, StoreUnavailable
from storage.filesystem import Bytes, Leftover, Store, check_key, exists, missing, precondition, token_of

log = logging.getLogger(__name__)
_NO_UNNAMED = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOSYS, errno.EXDEV})
"""What a file system answers that has no files without a name, or can't link one."""


class LocalStore:
    """Files below a folder. Creation is a file without a name + fsync + hard link + fsync of the folder, so it is
    exclusive, a file is there whole or not at all, and a killed writer leaves nothing behind. Where the file system
    has no such files (which the first one finds out), they get a temporary name first, which nobody takes for an
    object; see `leftover`."""

    def __init__(self, root: str | os.PathLike[str], *, fsync: bool = True, unnamed: bool = True) -> None:
        self._root = Path(root).absolute()
        self._prefix = f"{self._root}/"
        self._fsync = fsync
        self._unnamed = unnamed and os.path.isdir("/proc/self/fd")

    trouble = ""

    @property
    def url(self) -> str:
        return f"file://{self._root}"

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _sync_folder(self, folder: str) -> None:
        if self._fsync:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def _make_folder(self, folder: str) -> None:
        missing = [place for place in (Path(folder), *Path(folder).parents) if not place.exists()]
        os.makedirs(folder, exist_ok=True)
        for place in reversed(missing):
            self._sync_folder(str(place.parent))

    def _write(self, handle: int, data: Bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
        if self._fsync:
            os.fsync(handle)

    def _write_temp(self, folder: str, data: Bytes) -> str:
        temp = f"{folder}/{_mine(os.getpid())}-{uuid.uuid4().hex}"
        handle = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            self._write(handle, data)
        except BaseException:
            _discard(temp)
            raise
        finally:
            os.close(handle)
        return temp

    def patient(self, deadline_s: float) -> LocalStore:
        del deadline_s  # it never waits for an answer
        return self

    def create(self, key: str, data: Bytes) -> None:
        path = self._prefix + check_key(key)
        folder = os.path.dirname(path)
        with _os_errors(self.url, key):
            try:
                try:
                    self._link_new(folder, path, data)
                except FileNotFoundError:
                    self._make_folder(folder)
                    self._link_new(folder, path, data)
            except FileExistsError as error:
                raise exists(key, self.url) from error
        self._confirm(folder, key)

    def _link_new(self, folder: str, path: str, data: Bytes) -> None:
        if self._unnamed:
            try:
                return self._link_unnamed(folder, path, data)
            except OSError as error:
                if error.errno not in _NO_UNNAMED:
                    raise
                self._unnamed = False
        temp = self._write_temp(folder, data)
        try:
            os.link(temp, path)
        finally:
            _discard(temp)  # an error here must not say that a file which is linked was not written

    def _link_unnamed(self, folder: str, path: str, data: Bytes) -> None:
        handle = os.open(folder, os.O_WRONLY | os.O_TMPFILE, 0o644)
        try:
            self._write(handle, data)
            # With a folder's descriptor Python calls linkat, which alone follows the link in /proc.
            os.link(f"/proc/self/fd/{handle}", path, src_dir_fd=handle, follow_symlinks=True)
        finally:
            os.close(handle)

    def _confirm(self, folder: str, key: str) -> None:
        try:
            self._sync_folder(folder)
        except OSError as error:
            raise CommitUnknown(
                f"{key!r} was linked, but its folder could not be synced: {error}",
                expected="a durable directory entry",
                action="check the disk; the writer reads the object back before it goes on",
            ) from error

    def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        path = self._path(key)
        try:
            with _os_errors(self.url, key), open(path, "rb") as file:
                file.seek(start)
                return file.read() if end is None else file.read(max(0, end - start))
        except FileNotFoundError as error:
            raise missing(key, self.url) from error

    def size(self, key: str) -> int | None:
        with _os_errors(self.url, key):
            try:
                return self._path(key).stat().st_size
            except FileNotFoundError:
                return None

    def list(self, prefix: str, after: str = "") -> list[str]:
        folder = self._path(prefix.rstrip("/"))
        with _os_errors(self.url, prefix):
            found = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
        keys = [path.relative_to(self._root).as_posix() for path in found]
        return [key for key in keys if key > after]

    def delete(self, keys: Iterable[str]) -> list[str]:
        failed: list[str] = []
        for key in keys:
            try:
                self._path(key).unlink(missing_ok=True)
            except OSError:
                failed.append(key)
        return failed

    def sweep(self, prefix: str) -> int:
        """Remove temporary files that killed processes left below `prefix`; returns how many. Only for an owner that
        knows that no other process is writing there; for others there is `leftover`."""
        stale = self._temporary(prefix)
        for path in stale:
            path.unlink(missing_ok=True)
        return len(stale)

    def _temporary(self, prefix: str) -> list[Path]:
        return list(self._path(prefix.rstrip("/")).rglob(f"{TEMP}*"))

    def leftover(self, prefix: str) -> list[str]:
        """See the function of that name."""
        with _os_errors(self.url, prefix):
            found = [path for path in self._temporary(prefix) if _is_left(path.name)]
        return sorted(path.relative_to(self._root).as_posix() for path in found)

    def leftovers(self, prefix: str, before: float) -> list[Leftover]:
        """Temporary files; see `Littered`. Those of dead processes of this host are left whatever their age."""
        found: list[Leftover] = []
        with _os_errors(self.url, prefix):
            for path in self._temporary(prefix):
                with contextlib.suppress(FileNotFoundError):  # linked and gone meanwhile
                    about = path.stat()
                    if about.st_mtime < before or _is_left(path.name):
                        name = path.relative_to(self._root).as_posix()
                        found.append(Leftover("temporary_files", name, about.st_size))
        return found

    def drop(self, leftovers: Iterable[Leftover]) -> list[str]:
        return self.delete([one.name for one in leftovers])

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        data = self.read(key)
        return data, token_of(data)

    def swap(self, key: str, data: Bytes, token: str | None) -> str:
        path = self._path(key)
        folder = str(path.parent)
        with _os_errors(self.url, key):
            self._make_folder(folder)
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                current = token_of(path.read_bytes()) if path.exists() else None
                if current != token:
                    raise precondition(key)
                temp = self._write_temp(folder, data)
                try:
                    os.replace(temp, path)
                except BaseException:
                    _discard(temp)
                    raise
            finally:
                os.close(lock)
        self._confirm(folder, key)
        return token_of(data)


TEMP = ".tmp-"
"""Begins the name of a file that is being written: host, process and a word of that process follow, then a number."""
_TEMP = re.compile(re.escape(TEMP) + r"(?P<host>.+)-(?P<pid>[0-9]+)-(?P<word>[0-9a-f]{8})-[0-9a-f]{32}")


def leftover(store: Store, prefix: str) -> list[str]:
    """Keys below `prefix` of what killed writers were writing; `store.delete` takes them. None on other stores.

    Only what is surely nobody's is listed: files of processes of this host that are gone, or whose number this very
    process has now. Those of other hosts are for these hosts to judge.
    """
    return store.leftover(prefix) if isinstance(store, LocalStore) else []


@cache
def _mine(pid: int) -> str:
    """How names of temp files begin that this process writes. The word tells it from a dead one with its number, as in
    a container whose only process always is number 1."""
    return f"{TEMP}{_host()}-{pid}-{uuid.uuid4().hex[:8]}"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname()) or "_"


def _is_left(name: str) -> bool:
    found = _TEMP.fullmatch(name)
    if found is None or found["host"] != _host():
        return False
    pid = int(found["pid"])
    if pid == os.getpid():
        return not name.startswith(f"{_mine(pid)}-")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # somebody else's, and alive
    return False


def _discard(temp: str) -> None:
    try:
        os.unlink(temp)
    except OSError as error:
        log.warning("op=write file=%s decision=leave_it reason=%s", temp, error)


class _os_errors:  # noqa: N801 - reads as a statement: `with _os_errors(...)`
    """Translate the operating system's errors into the store's, keeping the cause."""

    _LATER = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ESTALE})

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url, key

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError) or hasattr(error, "code") or isinstance(error, FileNotFoundError):
            return
        what = f"{error.strerror or error} at {self._key!r} in {self._url}"
        if error.errno in self._LATER:
            raise StoreUnavailable(
                what,
                expected="a disk that accepts writes",
                action="free space or repair the disk; the write is retried",
            ) from error
        raise StorageUnusable(
            what, expected="a folder this user can read and write", action="check the storage url and its permissions"
        ) from error
