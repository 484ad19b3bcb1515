"""Keys of an S3 store from a Prefect block.

Save a block once (UI: Blocks, or `S3Credentials(...).save("NAME")`), then name it in the storage url:
`s3://bucket/prefix?credentials=prefect:NAME`. Each process of a run asks the Prefect server for it by itself, so the
keys are in no parameter, no actor argument and no file of ours; they are asked for again when the store calls them
expired.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from storage.credentials import Credentials
from storage.errors import StorageUnusable


class S3Credentials(Block):
    """Access key of an S3 store."""

    _block_type_name = "Tidegate S3 credentials"
    _block_type_slug = "tidegate-s3-credentials"
    _description = "Access key, secret and session token of an S3 store. Name it in storage.url."

    access_key_id: SecretStr = Field(title="Access key id")
    secret_access_key: SecretStr = Field(title="Secret access key")
    session_token: SecretStr | None = Field(default=None, title="Session token, for temporary keys")


def from_block(name: str) -> Credentials:
    """The keys of block `name`, read now from the Prefect server of this process. Raises `StorageUnusable`."""
    with ThreadPoolExecutor(1) as thread:  # the caller's thread may run an event loop
        return thread.submit(lambda: asyncio.run(_load(name))).result()


async def _load(name: str) -> Credentials:
    try:
        block = await S3Credentials.aload(name)
    except ValueError as error:  # Prefect's answer for a block that is not there
        raise StorageUnusable(
            f"no Prefect block {S3Credentials._block_type_slug}/{name}",
            expected="a saved block of that name on the Prefect server of this process (PREFECT_API_URL)",
            action="save it (UI: Blocks), or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY and leave credentials out",
            code="credentials",
        ) from error
    token = block.session_token.get_secret_value() if block.session_token else None
    return Credentials(block.access_key_id.get_secret_value(), block.secret_access_key.get_secret_value(), token)
