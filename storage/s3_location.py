"""A storage url of S3: everything a process needs to find the store, and no secret."""

from __future__ import annotations

from dataclasses import dataclass, replace
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit

from storage.errors import StorageUnusable

OPTIONS = ("endpoint", "region", "credentials")


@dataclass(frozen=True, slots=True)
class S3Location:
    """`s3://bucket/prefix?endpoint=...&region=...&credentials=...`; what is empty comes from the environment, as the
    AWS tools read it (AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, profiles, instance roles)."""

    bucket: str
    prefix: str
    endpoint: str = ""
    region: str = ""
    credentials: str = ""

    @property
    def url(self) -> str:
        given = {name: getattr(self, name) for name in OPTIONS if getattr(self, name)}
        query = urlencode(given, safe="/:", quote_via=quote)
        return f"s3://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "") + (f"?{query}" if query else "")

    def key(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key


def parse_s3(url: str) -> S3Location:
    """Raises `StorageUnusable`; a url with keys in it is refused without repeating them."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if "@" in parts.netloc or {name.lower() for name in options} & {"key", "secret", "token", "password"}:
        raise _refused(
            "a storage url that contains credentials",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a source: ?credentials=prefect:NAME; then"
            " replace these keys, which parameters and logs may hold now",
        )
    if not parts.netloc:
        raise _refused(f"storage url {url!r}", "name a bucket: s3://bucket/prefix")
    unknown = sorted(options.keys() - set(OPTIONS))
    if unknown:
        raise _refused(f"storage url with option {unknown[0]!r}", f"use only {', '.join(OPTIONS)}")
    prefix = parts.path.strip("/")
    if any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
        raise _refused(f"storage url {url!r}", "use a prefix without empty, '.' or '..' parts")
    if options.get("endpoint") and not _is_address(urlsplit(options["endpoint"])):
        shown = repr(options["endpoint"]) if "@" not in options["endpoint"] else "with credentials in it"
        raise _refused(f"endpoint {shown}", "use http://host:port or https://host[:port]")
    return S3Location(parts.netloc, prefix, **options)


def without_credentials(url: str) -> str:
    """A storage url as others may use it, with credentials of their own."""
    return replace(parse_s3(url), credentials="").url if url.startswith("s3://") else url


def _is_address(parts: SplitResult) -> bool:
    return parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc


def _refused(found: str, action: str) -> StorageUnusable:
    return StorageUnusable(found, expected="s3://bucket/prefix?endpoint=...&region=...", action=action, code="url")
