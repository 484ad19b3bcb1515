"""What an exception of one S3 request means: a verdict, and whether a write may have been applied.

Codes are those of the S3 API's error responses and of botocore's client-side exceptions. No text of the store or of a
library is passed on, so that no key can be in it.
"""

from __future__ import annotations

import asyncio
import socket
from enum import Enum, auto
from typing import Any, NamedTuple

import aiohttp
from botocore import exceptions as boto  # pyright: ignore[reportMissingTypeStubs]


class Verdict(Enum):
    """`LATER`: not applied, try again. `UNKNOWN`: the reply was lost or says nothing, a write may have been applied.
    `EXPIRED`: not applied, ask for new credentials. `UNUSABLE`: the user must change something."""

    LATER = auto()
    UNKNOWN = auto()
    EXPIRED = auto()
    PRECONDITION = auto()
    MISSING = auto()
    RANGE = auto()
    UNUSABLE = auto()


class Meaning(NamedTuple):
    verdict: Verdict
    code: str
    """Stable reason code of the error that is raised for it."""
    found: str
    action: str = ""


_CREDENTIALS = (
    "check the access key, the secret and the policy of this identity, which needs s3:ListBucket, s3:GetObject,"
    " s3:PutObject and s3:DeleteObject"
)
_CLOCK = "set this machine's clock (NTP); the store refuses requests from another time"
_USER: dict[str, tuple[str, str]] = {
    "NoSuchBucket": ("no_bucket", "create the bucket, or correct the storage url"),
    "InvalidBucketName": ("no_bucket", "correct the bucket in the storage url"),
    "AccessDenied": ("credentials", _CREDENTIALS),
    "AllAccessDisabled": ("credentials", _CREDENTIALS),
    "AccountProblem": ("credentials", _CREDENTIALS),
    "Forbidden": ("credentials", _CREDENTIALS),
    "403": ("credentials", _CREDENTIALS),
    "401": ("credentials", _CREDENTIALS),
    "InvalidAccessKeyId": ("credentials", _CREDENTIALS),
    "SignatureDoesNotMatch": ("credentials", _CREDENTIALS),
    "InvalidToken": ("credentials", _CREDENTIALS),
    "InvalidSecurity": ("credentials", _CREDENTIALS),
    "RequestTimeTooSkewed": ("clock_skew", _CLOCK),
    "RequestExpired": ("clock_skew", _CLOCK),
    "PermanentRedirect": ("region", "set region (and endpoint) of the storage url to the bucket's own"),
    "AuthorizationHeaderMalformed": ("region", "set region (and endpoint) of the storage url to the bucket's own"),
    "IllegalLocationConstraintException": ("region", "set region of the storage url to the bucket's own"),
    "301": ("region", "set region (and endpoint) of the storage url to the bucket's own"),
    "NotImplemented": ("unsupported", "use a store that implements conditional writes"),
    "MethodNotAllowed": ("unsupported", "use a store that implements the S3 API; check the endpoint"),
    "EntityTooLarge": ("too_large", "report this as a bug: an object is larger than one PUT may be"),
    "InvalidObjectState": ("archived", "restore the object from its archive class"),
}  # fmt: skip
# "400" is an answer without a body, to a HEAD: what that says elsewhere in a body is an expired token, as a rule.
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "400"})
_LATER = frozenset({"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests",
                    "BandwidthLimitExceeded", "429", "ConditionalRequestConflict", "OperationAborted", "409",
                    "RequestTimeout", "BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody",
                    "XAmzContentChecksumMismatch", "InvalidDigest", "InsufficientStorage", "507"})  # fmt: skip


def meaning(error: BaseException) -> Meaning:
    """Classify what one request raised: s3fs's translation, botocore's error, or the transport's."""
    response = _response(error)
    if response is not None:
        return _of_response(response)
    chain = _chain(error)
    not_sent = next((one for one in chain if isinstance(one, _NOT_SENT)), None)
    if not_sent is not None:
        name = type(not_sent).__name__
        return Meaning(Verdict.LATER, "unreachable", f"no connection ({name})", "check the endpoint and the network")
    for one in chain:
        found = _of_transport(one)
        if found is not None:
            return found
    return Meaning(Verdict.UNKNOWN, "store_unavailable", type(error).__name__)


def _chain(error: BaseException | None) -> list[BaseException]:
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _response(error: BaseException) -> dict[str, Any] | None:
    for one in _chain(error):
        response = getattr(one, "response", None)
        if isinstance(response, dict) and "Error" in response:
            return response  # pyright: ignore[reportUnknownVariableType]
    return None


def _of_response(response: dict[str, Any]) -> Meaning:
    code = str(response["Error"].get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    found = f"the store answered {status} {code}".strip()
    if code in _EXPIRED:
        return Meaning(Verdict.EXPIRED, "credentials_expired", found, "renew the credentials; the write is repeated")
    if code == "PreconditionFailed" or status == 412:
        return Meaning(Verdict.PRECONDITION, "precondition", found)
    if code in ("NoSuchKey", "404", "NotFound"):
        return Meaning(Verdict.MISSING, "object_missing", found)
    if code in ("InvalidRange", "416"):
        return Meaning(Verdict.RANGE, "range", found)
    if code in _LATER:
        return Meaning(Verdict.LATER, "store_unavailable", found)
    if code in _USER:
        return Meaning(Verdict.UNUSABLE, _USER[code][0], found, _USER[code][1])
    if 400 <= status < 500 and status != 408:
        return Meaning(Verdict.UNUSABLE, "refused", found, "check the storage url, and that the store is an S3 store")
    return Meaning(Verdict.UNKNOWN, "store_unavailable", found)


_NO_KEYS = (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError,
            boto.ProfileNotFound, boto.TokenRetrievalError)  # fmt: skip
# botocore's EndpointConnectionError is no proof: it also stands for a connection that was reset after the request.
_NOT_SENT = (boto.ConnectTimeoutError, boto.ProxyConnectionError, aiohttp.ClientConnectorError, socket.gaierror,
             ConnectionRefusedError)  # fmt: skip
_LOST = (TimeoutError, asyncio.IncompleteReadError, ConnectionError, aiohttp.ClientError, boto.HTTPClientError,
         boto.IncompleteReadError, boto.ResponseStreamingError, boto.FlexibleChecksumError,
         boto.EndpointConnectionError)  # fmt: skip


def _of_transport(error: BaseException) -> Meaning | None:
    name = type(error).__name__
    if isinstance(error, _NO_KEYS):
        return Meaning(
            Verdict.UNUSABLE, "credentials", f"no usable credentials ({name})",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or ?credentials=prefect:NAME",
        )  # fmt: skip
    if isinstance(error, _LOST):
        return Meaning(Verdict.UNKNOWN, "store_unavailable", f"no reply ({name})")
    if isinstance(error, boto.BotoCoreError | ValueError):
        return Meaning(
            Verdict.UNUSABLE, "endpoint", f"the client refused the request ({name})",
            "check bucket, endpoint and region of the storage url",
        )  # fmt: skip
    return None
