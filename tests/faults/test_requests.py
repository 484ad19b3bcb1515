"""What networks and stores do to requests of every kind, through a proxy in front of SeaweedFS: each call of a store
ends as if nothing had happened, or says that it does not know."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flows.seaweed import S3Server, exported
from storage.clock import VirtualClock
from storage.errors import CommitUnknown, ObjectExists, ObjectMissing, PreconditionFailed, StorageUnusable
from storage.filesystem import Store
from storage.opening import open_store
from storage.publisher import ThreadPublisher
from storage.s3 import S3Store
from storage.s3_connection import S3Limits
from storage.s3_location import parse_s3
from tests import servers
from tests.faults.proxy import Fault, Proxy, proxied
from tests.processes import wait_for
from tests.storage.publishing import capture, check, newest, state

LIMITS = S3Limits(deadline_s=60.0, request_s=60.0, connect_s=20.0, page=40)
HOLD_S = 0.1
DATA = random.Random(3).randbytes(20_000)
OTHER = random.Random(4).randbytes(20_000)


def through(proxy: Proxy, direct: Store) -> S3Store:
    """The same place through the proxy. Pauses between tries take no real time; the deadline comes by them."""
    where, clock = parse_s3(direct.url), VirtualClock()
    there = parse_s3(f"s3://{where.bucket}/{where.prefix}?endpoint={proxy.endpoint}&region={where.region}")
    return S3Store(there, LIMITS, clock=clock, sleep=clock.advance, dice=random.Random(0))


@pytest.fixture
def proxy(seaweed: S3Server) -> Iterator[Proxy]:
    with proxied(seaweed.endpoint) as one:
        yield one


@pytest.fixture
def direct(seaweed: S3Server) -> Store:
    return open_store(seaweed.url(f"q/{uuid.uuid4().hex[:8]}"))


@pytest.fixture
def store(proxy: Proxy, direct: Store) -> S3Store:
    return through(proxy, direct)


class Verb(NamedTuple):
    """A call, the method of its requests, and whether it came to what it should."""

    method: str
    call: Callable[[Store], Any]
    holds: Callable[[Any, Store], bool]


VERBS = {
    "create": Verb("PUT", lambda s: s.create("v/new", DATA), lambda found, d: d.read("v/new") == DATA),
    "swap": Verb(
        "PUT", lambda s: s.swap("v/old", OTHER, s.read_versioned("v/old")[1]),
        lambda found, d: d.read_versioned("v/old") == (OTHER, found),
    ),
    "read": Verb("GET", lambda s: s.read("v/old"), lambda found, d: found == DATA),
    "read a range": Verb("GET", lambda s: s.read("v/old", 100, 9000), lambda found, d: found == DATA[100:9000]),
    "read with a token": Verb(
        "GET", lambda s: s.read_versioned("v/old"), lambda found, d: found == d.read_versioned("v/old")
    ),
    "size": Verb("HEAD", lambda s: s.size("v/old"), lambda found, d: found == len(DATA)),
    "size of nothing": Verb("HEAD", lambda s: s.size("v/none"), lambda found, d: found is None),
    "list": Verb("GET", lambda s: s.list("w"), lambda found, d: sorted(found) == [f"w/{n:03d}" for n in range(60)]),
    "delete": Verb(
        "POST", lambda s: s.delete(["v/old", "v/none"]), lambda found, d: found == [] and d.size("v/old") is None
    ),
}  # fmt: skip
EVERYWHERE = [Fault.REFUSED, Fault.DROPPED, Fault.LOST_REPLY, Fault.DELAYED, Fault.TIMEOUT, Fault.SLOW_DOWN,
              Fault.ERROR, Fault.CONFLICT, Fault.EXPIRED, Fault.FULL]  # fmt: skip
OF_METHOD = {
    "PUT": [Fault.HALF_SENT, Fault.ALTERED, Fault.EMPTY],
    "GET": [Fault.TRUNCATED, Fault.EMPTY],
    "POST": [Fault.HALF_SENT, Fault.TRUNCATED],
    "HEAD": [Fault.EMPTY],
}


RARELY = ("read a range", "read with a token", "size of nothing")
"""The same requests as another call's."""


@pytest.mark.parametrize(
    "verb", [pytest.param(verb, marks=pytest.mark.slow) if verb in RARELY else verb for verb in VERBS]
)
def test_a_call_that_meets_a_fault_in_any_phase_ends_as_if_it_had_met_none(
    verb: str, store: S3Store, direct: Store, proxy: Proxy
) -> None:
    method, call, holds = VERBS[verb]
    if verb == "list":
        for number in range(60):
            direct.create(f"w/{number:03d}", b"x")
    for fault in [*EVERYWHERE, *OF_METHOD[method]]:
        direct.delete(["v/new", "v/old"])
        direct.create("v/old", DATA)
        call(store) if verb == "read" else store.size("v/old")  # a connection that is kept from before
        proxy.add(
            fault, method, times=2, hold_s=HOLD_S, delay_s=HOLD_S / 2, skip=int(verb == "swap" and method == "GET")
        )
        found = call(store)
        assert proxy.hits.pop(fault) == 2, fault
        assert holds(found, direct), fault
        proxy.clear()
        for late in proxy.late:
            wait_for(late.done)
        assert holds(found, direct), f"{fault}, and what came late"


def test_a_burst_of_slow_down_is_sat_out_by_every_call(store: S3Store, direct: Store, proxy: Proxy) -> None:
    direct.create("v/old", DATA)
    for verb, (method, call, holds) in VERBS.items():
        if verb in ("list", "swap", *RARELY):
            continue
        proxy.add(Fault.SLOW_DOWN, method, times=10)
        found = call(store)
        assert proxy.hits.pop(Fault.SLOW_DOWN) == 10
        assert holds(found, direct), verb


# ---------------------------------------------------------------------- attempts that come late


def test_a_delayed_create_that_lands_after_its_own_retry_changes_nothing(
    store: S3Store, direct: Store, proxy: Proxy
) -> None:
    proxy.add(Fault.DELAYED, "PUT", delay_s=1e6, hold_s=HOLD_S)
    store.create("a", DATA)
    before = direct.read_versioned("a")
    proxy.land()
    wait_for(lambda: proxy.landed)
    assert proxy.landed == [412]
    assert direct.read_versioned("a") == before


def test_a_delayed_swap_that_lands_after_later_ones_takes_nothing_back(
    store: S3Store, direct: Store, proxy: Proxy
) -> None:
    token = store.swap("low", b"1", None)
    proxy.add(Fault.DELAYED, "PUT", delay_s=1e6, hold_s=HOLD_S)
    token = store.swap("low", b"2", token)
    store.swap("low", b"3", token)
    proxy.land()
    wait_for(lambda: proxy.landed)
    assert proxy.landed == [412]
    assert direct.read("low") == b"3"


def test_a_swap_whose_reply_is_lost_and_that_another_overtakes_is_refused_and_not_repeated(
    store: S3Store, direct: Store, proxy: Proxy
) -> None:
    """The second try finds another value: whether the first was applied in between, nobody can tell any more."""
    token = store.swap("low", b"1", None)
    proxy.add(Fault.DROPPED, "PUT", times=1)
    direct.swap("low", b"9", token)
    with pytest.raises(PreconditionFailed):
        store.swap("low", b"2", token)
    assert direct.read("low") == b"9"


# ---------------------------------------------------------------------- uploads in the middle


def uploads(store: S3Store) -> list[Any]:
    """Multipart uploads that somebody has begun in the bucket."""
    bucket = parse_s3(store.url).bucket
    found = store._connection.run(lambda fs: fs._call_s3("list_multipart_uploads", Bucket=bucket), 30.0)
    return [one for one in found.get("Uploads", []) if "part/" in one["Key"]]


@pytest.mark.slow
def test_a_large_object_is_one_put_and_no_multipart_upload(store: S3Store, direct: Store, proxy: Proxy) -> None:
    """s3fs would cut a file of this size; nothing that could be left behind is ever begun."""
    data = bytes(random.Random(5).randbytes(1 << 20) * 110)
    store.create("large", data)
    assert proxy.requests == {"PUT": 1}
    assert not any("upload" in path for path in proxy.paths)
    assert uploads(store) == []
    assert direct.size("large") == len(data)


def test_a_client_that_ends_in_the_middle_of_a_body_leaves_nothing(store: S3Store, direct: Store, proxy: Proxy) -> None:
    direct.create("part/other", b"x")
    proxy.add(Fault.HALF_SENT, "PUT", times=1000)
    with pytest.raises(CommitUnknown):
        store.create("part/mine", DATA * 5)
    proxy.clear()
    assert direct.list("part") == ["part/other"]
    with pytest.raises(ObjectMissing):
        direct.read("part/mine")
    assert uploads(store) == []
    store.create("part/mine", DATA * 5)
    with pytest.raises(ObjectExists):
        direct.create("part/mine", OTHER)
    assert direct.read("part/mine") == DATA * 5


# ---------------------------------------------------------------------- credentials that change


class Keys:
    """A credentials file, as the AWS tools read it, and a store that no longer takes `old` (moto, which takes any)."""

    def __init__(self, path: Path, proxy: Proxy) -> None:
        self.path, self.proxy = path, proxy
        self.after, self.late, self.code, self.refusals = 10**9, 0, "", 0
        self.write("old")
        proxy.refuse = self._refuse

    def write(self, key: str) -> None:
        half = self.path.with_suffix(".new")
        half.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n")
        half.replace(self.path)  # whoever reads meanwhile finds one or the other

    def _refuse(self, key: str) -> str:
        """From the `after`-th PUT on; the file is renewed after `late` refusals."""
        if key != "old" or self.proxy.requests["PUT"] <= self.after:
            return ""
        self.refusals += 1
        if self.refusals > self.late:
            self.write("new")
        return self.code


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keys]:
    with servers.moto(tmp_path) as server, exported(server), proxied(server.endpoint) as proxy:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        found = Keys(tmp_path / "credentials", proxy)
        found.url = server.url("c")  # type: ignore[attr-defined]
        yield found


@pytest.mark.parametrize(
    ("code", "late"), [("ExpiredToken", 0), ("ExpiredToken", 6), ("InvalidAccessKeyId", 0)],
    ids=["renewed already", "renewed later", "replaced"],
)  # fmt: skip
def test_credentials_that_expire_in_the_middle_of_an_upload_are_read_again_and_only_what_was_refused_is_repeated(
    code: str, late: int, keys: Keys
) -> None:
    store = through(keys.proxy, open_store(keys.url))  # type: ignore[attr-defined]
    publisher = ThreadPublisher(store)
    first = publisher.publish("r", 1, capture(1, state(1)), None)
    keys.after, keys.code, keys.late = keys.proxy.requests["PUT"] + 2, code, late
    made = state(2)
    written = publisher.publish("r", 1, capture(2, made), newest(first))
    check(store, written, made)
    assert keys.refusals > late
    assert keys.proxy.keys["new"] > 0
    puts = [path for path in keys.proxy.paths if path.startswith("PUT")]
    assert len(puts) - keys.refusals == len(set(puts)), "each object was stored by one request"


def test_refused_credentials_that_nobody_renews_are_the_users_to_mend(keys: Keys) -> None:
    store = through(keys.proxy, open_store(keys.url))  # type: ignore[attr-defined]
    store.create("a", DATA)
    keys.after, keys.code, keys.late = 0, "InvalidAccessKeyId", 10**9
    with pytest.raises(StorageUnusable, match="access key") as caught:
        store.create("b", DATA)
    assert (caught.value.code, keys.refusals) == ("credentials", 2)


# ---------------------------------------------------------------------- stores that do not check


def test_a_store_that_does_not_check_what_it_gets_is_found_out(keys: Keys) -> None:
    """moto stores whatever arrives."""
    store = through(keys.proxy, open_store(keys.url))  # type: ignore[attr-defined]
    keys.proxy.add(Fault.ALTERED, "PUT", times=1)
    with pytest.raises(StorageUnusable, match="stored other bytes"):
        store.create("a", DATA)
