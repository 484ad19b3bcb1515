"""S3: the contract on two implementations, and what networks and stores do to requests, through a proxy."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.seaweed import S3Server, exported
from storage.clock import VirtualClock
from storage.credentials import Credentials
from storage.errors import (
    ArtifactCorrupt,
    CommitUnknown,
    ObjectExists,
    ObjectMissing,
    PreconditionFailed,
    StorageUnusable,
    StoreUnavailable,
)
from storage.filesystem import Store, read_proven
from storage.opening import open_store, probe, reach
from storage.s3 import S3Store
from storage.s3_connection import S3Limits
from storage.s3_location import parse_s3
from tests import servers
from tests.faults.proxy import Fault, Proxy, proxied
from tests.processes import wait_for
from tests.storage.contract import StoreContract

LIMITS = S3Limits(deadline_s=60.0, request_s=60.0, connect_s=20.0)
HOLD_S = 0.3
"""How long the proxy holds a request that gets no reply, before the connection ends."""


def fresh(server: S3Server, endpoint: str = "") -> str:
    return server.url(f"t/{uuid.uuid4().hex[:8]}", endpoint=endpoint)


@pytest.fixture(scope="module")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


class S3Contract(StoreContract):
    races = 2
    many = 100

    def open(self, server: S3Server) -> Store:
        return S3Store(parse_s3(fresh(server)), S3Limits(page=40))


class TestSeaweed(S3Contract):
    @pytest.fixture
    def store(self, seaweed: S3Server) -> Store:
        return self.open(seaweed)


class TestMoto(S3Contract):
    @pytest.fixture
    def store(self, moto_server: S3Server) -> Iterator[Store]:
        with exported(moto_server):
            yield self.open(moto_server)


def test_a_store_that_ignores_preconditions_is_refused(tmp_path: Path) -> None:
    with servers.rclone(tmp_path) as server, exported(server):
        store = open_store(fresh(server))
        reach(store, "runs/x")
        with pytest.raises(StorageUnusable, match="store_not_exclusive") as caught:
            probe(store, "runs/x")
        assert caught.value.exit_code == 2
        assert store.list("runs") == []


# ---------------------------------------------------------------------- requests that go wrong


@pytest.fixture
def proxy(seaweed: S3Server) -> Iterator[Proxy]:
    with proxied(seaweed.endpoint) as one:
        yield one


@pytest.fixture
def direct(seaweed: S3Server) -> Store:
    """The same place as `store`, past the proxy."""
    return open_store(fresh(seaweed))


@pytest.fixture
def store(proxy: Proxy, direct: Store) -> S3Store:
    where = parse_s3(direct.url)
    there = parse_s3(f"s3://{where.bucket}/{where.prefix}?endpoint={proxy.endpoint}&region={where.region}")
    clock = VirtualClock()  # pauses between tries take no real time, and the deadline comes by them
    return S3Store(there, LIMITS, clock=clock, sleep=clock.advance, dice=random.Random(0))


RETRIED = [Fault.LOST_REPLY, Fault.DELAYED, Fault.DROPPED, Fault.TIMEOUT, Fault.SLOW_DOWN, Fault.ERROR, Fault.CONFLICT,
           Fault.EXPIRED, Fault.FULL]  # fmt: skip


@pytest.mark.parametrize("fault", RETRIED)
def test_a_create_that_meets_a_fault_is_repeated_and_never_refused_by_itself(
    fault: Fault, store: S3Store, direct: Store, proxy: Proxy
) -> None:
    proxy.add(fault, "PUT", times=2, hold_s=HOLD_S)
    store.create("a", b"mine")
    assert proxy.hits[fault] == 2
    assert direct.read("a") == b"mine"
    with pytest.raises(ObjectExists):
        store.create("a", b"mine")


@pytest.mark.parametrize("fault", RETRIED)
def test_a_swap_that_meets_a_fault_takes_effect_once(fault: Fault, store: S3Store, direct: Store, proxy: Proxy) -> None:
    token = store.swap("low", b"1", None)
    proxy.add(fault, "PUT", times=1, hold_s=HOLD_S)
    token = store.swap("low", b"2", token)
    assert direct.read_versioned("low") == (b"2", token)
    with pytest.raises(PreconditionFailed):
        store.swap("low", b"3", "another")


@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.ERROR, Fault.DROPPED])
def test_a_refusal_after_an_unclear_try_is_a_refusal_when_the_bytes_are_others(
    fault: Fault, store: S3Store, direct: Store, proxy: Proxy
) -> None:
    direct.create("a", b"theirs")
    proxy.add(fault, "PUT", times=1)
    with pytest.raises(ObjectExists):
        store.create("a", b"mine")
    assert direct.read("a") == b"theirs"


def test_an_outcome_that_stays_unknown_is_said_to_be_unknown_and_the_same_call_finds_out(
    store: S3Store, direct: Store, proxy: Proxy
) -> None:
    proxy.add(Fault.LOST_REPLY, "PUT", times=1)
    proxy.add(Fault.DROPPED, times=1000)
    with pytest.raises(CommitUnknown, match="may be stored"):
        store.create("a", b"mine")
    proxy.clear()
    with pytest.raises(ObjectExists):  # the caller, who knows what he wrote, reads it back
        store.create("a", b"mine")
    assert direct.read("a") == b"mine"


def test_a_store_that_never_took_the_request_is_unavailable_not_unknown(store: S3Store, proxy: Proxy) -> None:
    proxy.add(Fault.SLOW_DOWN, times=1000)
    with pytest.raises(StoreUnavailable, match="SlowDown") as caught:
        store.create("a", b"mine")
    assert not isinstance(caught.value, CommitUnknown)
    assert 10 < proxy.hits[Fault.SLOW_DOWN] < 80, "bounded retries with a pause between them"
    with pytest.raises(StoreUnavailable):
        store.read("a")


def test_a_delayed_first_attempt_that_lands_after_the_writer_gave_up_is_found_by_the_next_call(
    store: S3Store, direct: Store, proxy: Proxy
) -> None:
    proxy.add(Fault.DELAYED, "PUT", delay_s=1e6, hold_s=HOLD_S, times=1)
    proxy.add(Fault.DROPPED, times=1000)
    with pytest.raises(CommitUnknown):
        store.create("a", b"mine")
    proxy.clear()
    assert direct.size("a") is None
    proxy.land()
    wait_for(lambda: direct.size("a") is not None)
    with pytest.raises(ObjectExists):
        store.create("a", b"mine")
    assert direct.read("a") == b"mine"


@pytest.mark.parametrize(
    "fault", [Fault.DROPPED, Fault.TIMEOUT, Fault.SLOW_DOWN, Fault.ERROR, Fault.TRUNCATED, Fault.EXPIRED]
)
def test_reads_are_repeated(fault: Fault, store: S3Store, direct: Store, proxy: Proxy) -> None:
    data = random.Random(1).randbytes(50_000)
    direct.create("a", data)
    proxy.add(fault, "GET", times=2, hold_s=HOLD_S)
    assert store.read("a") == data
    proxy.add(fault, "GET", times=1, hold_s=HOLD_S)
    assert store.read("a", 100, 200) == data[100:200]
    assert proxy.hits[fault] == 3


def test_a_bit_that_flips_on_the_wire_is_read_again_once_and_never_passes_a_proof(
    store: S3Store, direct: Store, proxy: Proxy
) -> None:
    data = random.Random(2).randbytes(1000)

    def prove(found: bytes) -> str:
        if found != data:
            raise ArtifactCorrupt("other bytes", expected="the same", action="none")
        return "proven"

    direct.create("a", data)
    proxy.add(Fault.BIT_FLIP, "GET", times=1)
    assert read_proven(store, "a", prove) == "proven"
    proxy.add(Fault.BIT_FLIP, "GET", times=1000)
    with pytest.raises((ArtifactCorrupt, StoreUnavailable)):  # the transport's checksum may find it first
        read_proven(store, "a", prove)


def test_the_same_bytes_from_another_call_are_a_refusal(store: S3Store, direct: Store) -> None:
    direct.create("a", b"same")
    with pytest.raises(ObjectExists):
        store.create("a", b"same")


def test_a_delete_that_fails_for_one_key_says_so(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create("a", b"x")

    def request(trying: object, call: object) -> object:
        return {"Errors": [{"Key": store._location.key("a"), "Code": "AccessDenied", "Message": "no"}]}

    monkeypatch.setattr(store, "_request", request)
    assert store.delete(["a", "b"]) == ["a"]


def test_expired_credentials_are_asked_for_again(store: S3Store, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create("a", b"x")
    first = store._connection._fs
    proxy.add(Fault.EXPIRED, times=1)
    assert store.read("a") == b"x"
    assert store._connection._fs is not first


def test_why_a_call_waits_can_be_read_meanwhile(store: S3Store, proxy: Proxy) -> None:
    seen: list[str] = []
    advance = store._sleep

    def sleep(seconds: float) -> None:
        seen.append(store.trouble)
        advance(seconds)

    store._sleep = sleep
    proxy.add(Fault.SLOW_DOWN, times=2)
    store.create("a", b"x")
    assert [("try" in text, "SlowDown" in text) for text in seen] == [(True, True)] * 2
    assert store.trouble == ""


# ---------------------------------------------------------------------- other processes


def _write(url: str, key: str) -> None:
    open_store(url).create(key, b"from a child")


def test_a_forked_and_a_spawned_child_connect_anew(direct: Store) -> None:
    direct.create("parent", b"x")  # the connection is open before the fork
    for method in ("fork", "spawn"):
        child = multiprocessing.get_context(method).Process(target=_write, args=(direct.url, method))
        child.start()
        child.join(30)
        assert child.exitcode == 0
        assert direct.read(method) == b"from a child"


def test_what_another_process_wrote_is_seen_at_once(seaweed: S3Server) -> None:
    url = fresh(seaweed)
    one, two = open_store(url), open_store(url)
    assert one.list("a") == []
    assert one.size("a/1") is None
    with pytest.raises(ObjectMissing):
        one.read("a/1")
    two.create("a/1", b"x")
    assert (one.read("a/1"), one.size("a/1"), one.list("a")) == (b"x", 1, ["a/1"])


# ---------------------------------------------------------------------- what the user got wrong


def refused(url: str) -> StorageUnusable:
    with pytest.raises(StorageUnusable) as caught:
        reach(open_store(url), "runs/x")
    assert caught.value.exit_code == 2
    return caught.value


def test_a_missing_bucket_says_so(seaweed: S3Server) -> None:
    assert refused(seaweed.url("x", bucket="nobucket")).code == "no_bucket"


def test_wrong_and_absent_keys_say_so_and_are_not_repeated(
    seaweed: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    error = refused(fresh(seaweed))
    assert error.code == "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    assert refused(fresh(seaweed)).code == "credentials"
    for text in (str(error), repr(error), repr(error.__cause__)):
        assert "not-the-secret" not in text
        assert seaweed.secret not in text


def test_an_endpoint_where_nothing_listens_and_one_that_never_answers_say_so_soon(
    seaweed: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.opening.FIRST_CONTACT_S", 3.0)
    assert refused(seaweed.url("x", endpoint="http://127.0.0.1:9")).code == "unreachable"
    with servers.deaf() as endpoint:
        assert "no reply" in str(refused(seaweed.url("x", endpoint=endpoint)))


@pytest.mark.parametrize(("fault", "code"), [(Fault.REGION, "region"), (Fault.SKEWED, "clock_skew")])
def test_a_wrong_region_and_a_wrong_clock_say_so(fault: Fault, code: str, store: S3Store, proxy: Proxy) -> None:
    proxy.add(fault, times=10)
    error = refused(store.url)
    assert error.code == code
    assert proxy.hits[fault] == 1, "not repeated: only the user can mend it"


def test_a_clock_that_is_wrong_by_an_hour_is_refused_by_the_real_server(
    seaweed: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datetime

    import botocore.auth

    real = botocore.auth.get_current_datetime
    monkeypatch.setattr(
        botocore.auth, "get_current_datetime", lambda *a, **b: real(*a, **b) + datetime.timedelta(hours=1)
    )
    assert refused(fresh(seaweed)).code == "clock_skew"


@pytest.mark.parametrize(
    "url",
    [
        "s3://", "s3://key:secret@bucket/x", "s3://bucket/x?secret=abc", "s3://bucket/a/../b", "s3://bucket/x?zone=1",
        "s3://bucket/x?endpoint=localhost:80", "s3://bucket/x?endpoint=http://u:p@host", "s3://bucket/a//b",
    ],
)  # fmt: skip
def test_urls_that_are_wrong_or_hold_keys_are_refused_without_repeating_them(url: str) -> None:
    with pytest.raises(StorageUnusable) as caught:
        open_store(url)
    assert "abc" not in str(caught.value)
    assert "key:secret" not in str(caught.value)
    assert "u:p" not in str(caught.value)


def test_a_url_survives_being_written_down() -> None:
    url = "s3://bucket/some/prefix?endpoint=http://127.0.0.1:80&region=eu-1&credentials=prefect:one"
    assert open_store(url).url == url
    assert open_store("s3://bucket").url == "s3://bucket"


# ---------------------------------------------------------------------- secrets


def test_no_secret_is_in_a_pickle_a_representation_or_an_error(seaweed: S3Server) -> None:
    store = open_store(fresh(seaweed))
    store.create("a", b"x")
    texts = [pickle.dumps(store).decode("latin1"), repr(store), str(vars(store))]
    with pytest.raises(ObjectMissing) as caught:
        store.read("b")
    texts += [str(caught.value), repr(caught.value), str(vars(caught.value))]
    for cause in (caught.value.__cause__, caught.value.__context__):
        texts += [repr(cause), str(getattr(cause, "__dict__", ""))]
    for text in texts:
        assert seaweed.secret not in text
        assert seaweed.key not in text


def test_credentials_are_neither_shown_nor_pickled() -> None:
    found = Credentials("the-key", "the-secret")
    assert "the-" not in repr(found) + str(found)
    with pytest.raises(TypeError, match="name of their source"):
        pickle.dumps(found)


@pytest.mark.parametrize("reference", ["nosource:x", "prefect", "prefect:"])
def test_a_source_of_credentials_that_is_not_there_is_refused(reference: str) -> None:
    assert refused(f"s3://bucket/x?credentials={reference}").code == "credentials"
