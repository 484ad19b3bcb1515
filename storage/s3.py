"""A store on S3: conditional puts of whole objects through s3fs.

Each write is one PUT of frozen bytes: exclusive by `If-None-Match: *`, verified by the sha256 that travels with it.
s3fs and botocore do not retry here; this store does, with full jitter and a total deadline. It never takes its own lost
reply for a refusal: each call marks its object, and "exists" with that mark is success. That covers tries that nobody
sees, too: aiohttp repeats a PUT by itself when a kept connection turns out to be closed, and so may a load balancer.
Nothing is streamed, so a writer that fails publishes nothing, and there are no multipart uploads to leave behind.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# (s3fs and fsspec have no stubs)

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import random
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from storage.clock import Clock, SystemClock
from storage.errors import CommitUnknown, StorageUnusable, StoreUnavailable, TidegateError
from storage.filesystem import Bytes, Leftover, check_key, exists, missing, precondition
from storage.s3_body import Body
from storage.s3_connection import Request, S3Connection, S3Limits
from storage.s3_location import S3Location
from storage.s3_outcome import Meaning, Verdict, meaning

MARK = "tidegate-write"
"""Metadata of an object: which call wrote it."""

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class _Trying:
    """One call: its deadline, its tries, and whether one of them may have been applied."""

    deadline: float
    allowance: float
    tries: int = 0
    unclear: bool = False
    refreshed: bool = False
    """Whether this call has asked for credentials anew."""
    last: Meaning = field(default_factory=lambda: Meaning(Verdict.LATER, "store_unavailable", "not tried"))


class S3Store:
    """See the module. Thread-safe; a forked or unpickled copy connects anew. `sleep` and `dice` pace the retries."""

    def __init__(
        self,
        location: S3Location,
        limits: S3Limits | None = None,
        *,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
        dice: random.Random | None = None,
    ) -> None:
        self._location, self._limits = location, limits or S3Limits()
        self._clock, self._sleep = clock or SystemClock(), sleep
        self._dice = dice or random.Random()
        self.trouble = ""
        self._connection = S3Connection(location, self._limits)

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (S3Store, (self._location, self._limits))

    @property
    def url(self) -> str:
        return self._location.url

    def patient(self, deadline_s: float) -> S3Store:
        """The same store whose calls end after `deadline_s`."""
        brief = replace(self._limits, deadline_s=deadline_s, request_s=min(self._limits.request_s, deadline_s))
        return S3Store(self._location, brief, clock=self._clock, sleep=self._sleep, dice=self._dice)

    # ------------------------------------------------------------------ the store's contract

    def create(self, key: str, data: Bytes) -> None:
        self._put(key, data, {"IfNoneMatch": "*"}, lambda: exists(key, self.url))

    def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        if end is not None and end <= start:
            if self.size(key) is None:
                raise missing(key, self.url)
            return b""
        span = {} if (start, end) == (0, None) else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
        return self._get(key, span)[0]

    def size(self, key: str) -> int | None:
        found = self._head(key)
        return None if found is None else int(found["ContentLength"])

    def _head(self, key: str) -> dict[str, Any] | None:
        async def head(fs: Any) -> dict[str, Any]:
            return _whole(await fs._call_s3("head_object", **self._place(key)), "ContentLength", "ETag")

        found = self._until(self._begin(), head, key, Verdict.MISSING)
        return None if isinstance(found, Meaning) else found

    def list(self, prefix: str, after: str = "") -> list[str]:
        folder = self._location.key(check_key(prefix.rstrip("/"))) + "/"
        cut = len(self._location.key("x")) - 1
        keys: list[str] = []
        token: str | None = None
        while True:
            page = self._page(folder, after, token)
            keys += [found["Key"][cut:] for found in page.get("Contents", ()) if not found["Key"].endswith("/")]
            token = page.get("NextContinuationToken")
            if not token:
                return [key for key in keys if key > after]

    def _page(self, folder: str, after: str, token: str | None) -> dict[str, Any]:
        more: dict[str, Any] = {"MaxKeys": self._limits.page}
        if token:
            more["ContinuationToken"] = token
        elif after:
            more["StartAfter"] = self._location.key(after)

        async def page(fs: Any) -> dict[str, Any]:
            found = await fs._call_s3("list_objects_v2", Bucket=self._location.bucket, Prefix=folder, **more)
            return _whole(found, "IsTruncated")

        return self._repeat(page, folder)

    def delete(self, keys: Iterable[str]) -> list[str]:
        wanted = [check_key(key) for key in keys]
        size = self._limits.page
        return [key for at in range(0, len(wanted), size) for key in self._delete(wanted[at : at + size])]

    def _delete(self, keys: list[str]) -> list[str]:
        names = {self._location.key(key): key for key in keys}

        async def delete(fs: Any) -> dict[str, Any]:
            listed = {"Objects": [{"Key": name} for name in names], "Quiet": True}
            return await fs._call_s3("delete_objects", Bucket=self._location.bucket, Delete=listed)

        answer = self._repeat(delete, keys[0])
        # A bulk delete answers 200 and reports what it could not delete inside.
        return [names[failed["Key"]] for failed in answer.get("Errors", ()) if failed.get("Code") != "NoSuchKey"]

    # ------------------------------------------------------------------ what others left

    def leftovers(self, prefix: str, before: float) -> list[Leftover]:
        """Multipart uploads that nobody completed: not ours, but of tools that copied a run here. See `Littered`."""
        folder = self._location.key(check_key(prefix.rstrip("/"))) + "/"
        cut = len(self._location.key("x")) - 1
        found: list[Leftover] = []
        at: dict[str, str] = {}
        while True:

            async def page(fs: Any, at: dict[str, str] = at) -> dict[str, Any]:
                return await fs._call_s3("list_multipart_uploads", Bucket=self._location.bucket, Prefix=folder, **at)

            answer = self._repeat(page, folder)
            old = [one for one in answer.get("Uploads", ()) if one["Initiated"].timestamp() < before]
            found += [Leftover("uploads", one["Key"][cut:], self._uploaded(one), one["UploadId"]) for one in old]
            if not answer.get("IsTruncated"):
                return found
            at = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    def _uploaded(self, upload: dict[str, Any]) -> int:
        """Bytes of its parts, of the first thousand of them."""

        async def parts(fs: Any) -> dict[str, Any]:
            place = {"Bucket": self._location.bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
            return await fs._call_s3("list_parts", **place)

        found = self._until(self._begin(), parts, upload["Key"], Verdict.MISSING)
        return 0 if isinstance(found, Meaning) else sum(part["Size"] for part in found.get("Parts", ()))

    def drop(self, leftovers: Iterable[Leftover]) -> list[str]:
        for one in leftovers:

            async def abort(fs: Any, one: Leftover = one) -> None:
                await fs._call_s3("abort_multipart_upload", **self._place(one.name), UploadId=one.place)

            self._until(self._begin(), abort, one.name, Verdict.MISSING)
        return []

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        return self._get(key, {})

    def swap(self, key: str, data: Bytes, token: str | None) -> str:
        condition = {"IfNoneMatch": "*"} if token is None else {"IfMatch": token}
        return self._put(key, data, condition, lambda: precondition(key))

    # ------------------------------------------------------------------ writing

    def _put(self, key: str, data: Bytes, condition: dict[str, str], refusal: Callable[[], TidegateError]) -> str:
        """One conditional PUT, repeated with the same bytes until its outcome is known; returns the ETag. `data` is not
        copied."""
        checksum = base64.b64encode(hashlib.sha256(data).digest()).decode()
        mark = uuid.uuid4().hex
        proof = {"ChecksumSHA256": checksum, "Metadata": {MARK: mark}}

        async def put(fs: Any) -> dict[str, Any]:
            found = await fs._call_s3("put_object", **self._place(key), Body=Body(data), **proof, **condition)
            return _whole(found, "ETag")

        trying = self._begin(len(data))
        found = self._until(trying, put, key, Verdict.PRECONDITION, Verdict.MISSING, write=True)
        if isinstance(found, Meaning):
            etag = self._ours(trying, key, mark)
            if etag is None:
                raise refusal()
            return etag
        self._check_stored(key, data, checksum, found)
        return str(found["ETag"])

    def _ours(self, trying: _Trying, key: str, mark: str) -> str | None:
        """After a refusal: the object's ETag if it is this very call that has stored it."""
        try:
            found = self._head(key)
        except StoreUnavailable as error:
            raise self._unknown(trying, key) from error
        ours = found is not None and found.get("Metadata", {}).get(MARK) == mark
        return str(found["ETag"]) if found is not None and ours else None

    def _check_stored(self, key: str, data: Bytes, checksum: str, answer: dict[str, Any]) -> None:
        """The store says which bytes it has: by their sha256, by their MD5, or they are read back."""
        if answer.get("ChecksumSHA256") == checksum:
            return
        if str(answer.get("ETag", "")).strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest():
            return
        if self._get(key, {})[0] != data:
            raise StorageUnusable(
                f"{self.url} stored other bytes than were sent for {key!r}",
                expected="a store that keeps what it accepts",
                action="use another store; look for a proxy that changes bodies",
                code="upload_altered",
            )

    # ------------------------------------------------------------------ reading

    def _get(self, key: str, span: dict[str, str]) -> tuple[bytes, str]:
        async def get(fs: Any) -> tuple[bytes, str]:
            found = _whole(await fs._call_s3("get_object", **self._place(key), **span), "ContentLength", "ETag")
            async with found["Body"] as body:
                data = await body.read()
            if len(data) != int(found["ContentLength"]):
                raise asyncio.IncompleteReadError(data, int(found["ContentLength"]))
            return data, str(found["ETag"])

        found = self._until(self._begin(), get, key, Verdict.MISSING, Verdict.RANGE)
        if not isinstance(found, Meaning):
            return found
        if found.verdict is Verdict.MISSING:
            raise missing(key, self.url)
        return b"", ""

    # ------------------------------------------------------------------ tries

    def _place(self, key: str) -> dict[str, str]:
        return {"Bucket": self._location.bucket, "Key": self._location.key(check_key(key))}

    def _begin(self, size: int = 0) -> _Trying:
        allowance = size / self._limits.slowest_bytes_s
        return _Trying(self._clock.monotonic() + self._limits.deadline_s + allowance, allowance)

    def _until(
        self, trying: _Trying, request: Request[T], key: str, *answers: Verdict, write: bool = False
    ) -> T | Meaning:
        """Repeat a request until it succeeds, or fails with one of `answers`: that is returned, any other raised."""
        while True:
            try:
                done = self._request(trying, request)
            except Exception as error:
                found = self._judge(trying, error)
                if found.verdict in answers:
                    self.trouble = ""
                    return found
                if self._renew(trying, found):
                    continue
                if found.verdict not in (Verdict.LATER, Verdict.UNKNOWN, Verdict.EXPIRED):
                    raise self._unusable(found) from error
                self._again(trying, key, write=write)
            else:
                self.trouble = ""
                return done

    def _repeat(self, request: Request[T], key: str) -> T:
        """An idempotent request that must succeed."""
        done = self._until(self._begin(), request, key)
        assert not isinstance(done, Meaning)
        return done

    def _request(self, trying: _Trying, request: Request[T]) -> T:
        trying.tries += 1
        left = trying.deadline - self._clock.monotonic()
        return self._connection.run(request, max(0.05, min(self._limits.request_s + trying.allowance, left)))

    def _judge(self, trying: _Trying, error: Exception) -> Meaning:
        """What a failed try means. Raises errors that are no answer of a store."""
        if isinstance(error, TidegateError):
            raise error
        found = trying.last = meaning(error)
        trying.unclear |= found.verdict is Verdict.UNKNOWN
        return found

    def _renew(self, trying: _Trying, found: Meaning) -> bool:
        """Ask for credentials anew when the store does not take these any more; whether to try again at once.

        Once at once. Expired ones are asked for again after each pause, since who renews them may come later than the
        store. Refused ones are not: they have been replaced already, or are wrong.
        """
        refused = found.code == "credentials" and not trying.refreshed
        if found.verdict is not Verdict.EXPIRED and not refused:
            return False
        self._connection.drop()
        first, trying.refreshed = not trying.refreshed, True
        return first

    def _again(self, trying: _Trying, key: str, *, write: bool = False) -> None:
        """Wait before the next try, or raise what is known at the deadline."""
        found = trying.last
        pause = self._dice.random() * min(self._limits.backoff_s, 0.1 * 2.0**trying.tries)
        if self._clock.monotonic() + pause < trying.deadline:
            self.trouble = f"{key}: try {trying.tries} failed: {found.found}"
            log.info(
                "op=store decision=retry pause=%.2f key=%s try=%d reason=%s", pause, key, trying.tries, found.found
            )
            self._sleep(pause)
            return
        if write and trying.unclear:
            raise self._unknown(trying, key)
        raise StoreUnavailable(
            f"{found.found} for {key!r} in {self.url}, {trying.tries} tries",
            expected=f"an answer within {self._limits.deadline_s:.0f} s",
            action=found.action or "repair the store or the way to it; the same call may be repeated",
            code=found.code,
        )

    def _unknown(self, trying: _Trying, key: str) -> CommitUnknown:
        return CommitUnknown(
            f"{trying.last.found} for {key!r} in {self.url}, {trying.tries} tries; it may be stored",
            expected=f"an answer within {self._limits.deadline_s:.0f} s",
            action="repair the store or the way to it; the writer repeats the same bytes until it knows",
        )

    def _unusable(self, found: Meaning) -> StorageUnusable:
        return StorageUnusable(
            f"{found.found} at {self.url}",
            expected="an S3 bucket that this identity may read and write",
            action=found.action or "check the storage url",
            code=found.code,
        )


def _whole(answer: dict[str, Any], *names: str) -> dict[str, Any]:
    """An answer that lacks what an S3 store always says is somebody else's: no reply of the store."""
    missing_ = [name for name in names if name not in answer]
    if missing_:
        raise ConnectionError(f"an answer without {missing_[0]}")
    return answer
