"""S3 at the command line: what a user gets wrong, and credentials that come from a Prefect block."""

from __future__ import annotations

import logging
import os
import pickle
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.config import RunConfig
from flows.seaweed import S3Server, exported
from gpu.prepare import prepare_run
from storage.clock import SystemClock
from storage.errors import StorageUnusable
from storage.opening import open_store
from tests import servers
from tests.flows.test_bad_input import refused


def train(url: str, capsys: pytest.CaptureFixture[str], *mentions: str) -> str:
    return refused(["train", "--set", 'run="r"', "--set", f'storage.url="{url}"'], capsys, *mentions)


def test_a_missing_bucket_and_wrong_keys_are_refused_before_anything_starts(
    seaweed: S3Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(seaweed.url("x", bucket="nobucket"), capsys, "NoSuchBucket", "create the bucket")
    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    said = train(seaweed.url("x"), capsys, "SignatureDoesNotMatch", "access key")
    assert "wrong-secret" not in said
    assert secret not in said
    for command in ("verify", "inspect", "status", "resume"):
        refused([command, "r", "--storage", seaweed.url("x")], capsys, "SignatureDoesNotMatch")


def test_a_wrong_endpoint_is_refused_soon(
    seaweed: S3Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.opening.FIRST_CONTACT_S", 2.0)
    train(seaweed.url("x", endpoint="http://127.0.0.1:9"), capsys, "no connection", "check the endpoint")


def test_keys_in_a_storage_url_are_refused_and_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    said = train("s3://AKIAKEY:SECRETSECRET@bucket/x", capsys, "credentials")
    assert "SECRETSECRET" not in said


def test_a_store_that_ignores_preconditions_is_refused_and_keeps_nothing(tmp_path: Path) -> None:
    with servers.rclone(tmp_path) as server, exported(server):
        url = server.url("x")
        spec = RunConfig.model_validate({"run": "r", "storage": {"url": url}}).spec("r")
        with pytest.raises(StorageUnusable, match="store_not_exclusive"):
            prepare_run(open_store(url), spec, SystemClock())
        assert open_store(url).list("runs") == []


# ---------------------------------------------------------------------- a Prefect block


@pytest.fixture(scope="module")
def prefect() -> Iterator[None]:
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=180):
        yield


def test_a_run_uses_the_keys_of_a_prefect_block_and_shows_them_nowhere(
    prefect: None, seaweed_server: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from flows.credentials import S3Credentials

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    S3Credentials(access_key_id=seaweed_server.key, secret_access_key=seaweed_server.secret).save("one")
    url = seaweed_server.url(uuid.uuid4().hex[:8]) + "&credentials=prefect:one"
    spec = RunConfig.model_validate({"run": "r", "storage": {"url": url}}).spec("r")
    with caplog.at_level(logging.DEBUG, logger="storage"):
        store = open_store(spec.storage_url)
        info = prepare_run(store, spec, SystemClock())
    texts = [
        caplog.text, repr(store), repr(spec), repr(info), str(vars(store)), pickle.dumps((store, spec)).decode("latin1")
    ]  # fmt: skip
    texts += [store.read(key).decode("latin1") for key in store.list("runs")]
    assert any("prefect:one" in text for text in texts), "the name may be seen"
    for text in texts:
        assert seaweed_server.secret not in text
        assert seaweed_server.key not in text


def test_a_block_that_is_not_there_says_so(prefect: None, seaweed_server: S3Server) -> None:
    store = open_store(seaweed_server.url("x") + "&credentials=prefect:none")
    with pytest.raises(StorageUnusable, match="no Prefect block tidegate-s3-credentials/none"):
        store.read("x")
