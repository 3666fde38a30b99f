"""S3's own ways: conditional writes, checksums of the whole object, final errors."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from pannier.storage import ConflictError, DeniedError, NotFoundError, StorageError, open_store
from pannier.storage.s3 import S3Store
from support.s3_server import S3Server
from support.sources import FileSource, some_bytes

BIG = (17 << 20) + 4321


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


def store_in(server: S3Server, place: str, deadline_s: float = 10, **options: object) -> S3Store:
    store = open_store(
        f"s3://{place}", storage_options={**server.options, **options}, deadline_s=deadline_s
    )
    assert isinstance(store, S3Store)
    return store


def test_large_uploads_carry_a_checksum_of_the_whole_object(
    server: S3Server, tmp_path: Path
) -> None:
    async def main() -> None:
        store = store_in(server, "bucket/whole")
        source = FileSource(tmp_path / "spool", some_bytes(BIG))
        await store.upload("file", source, progress=lambda held: None, retried=pytest.fail)
        info = await store.stat("file")
        assert info is not None
        assert info.crc32c == source.crc
        await store.close()

    asyncio.run(main())
    head = server.client.head_object(Bucket="bucket", Key="whole/file", ChecksumMode="ENABLED")
    assert head["ChecksumType"] == "FULL_OBJECT"


def test_an_object_without_a_stored_checksum_is_read_back(server: S3Server, tmp_path: Path) -> None:
    data = some_bytes(BIG)
    server.client.put_object(Bucket="bucket", Key="plain/file", Body=data)

    async def main() -> None:
        store = store_in(server, "bucket/plain")
        info = await store.stat("file")
        assert info is not None
        assert info.crc32c is None
        same = FileSource(tmp_path / "same", data)
        found = await store.upload("file", same, progress=lambda held: None, retried=pytest.fail)
        assert found.crc32c == same.crc
        other = FileSource(tmp_path / "other", some_bytes(BIG, seed=1))
        with pytest.raises(ConflictError):
            await store.upload("file", other, progress=lambda held: None, retried=pytest.fail)
        await store.close()

    asyncio.run(main())


def test_a_missing_bucket_and_a_wrong_endpoint_are_told(server: S3Server) -> None:
    async def main() -> None:
        store = store_in(server, "no-such-bucket/a")
        with pytest.raises(NotFoundError, match=r"NoSuchBucket.*check the bucket's name"):
            await store.probe()
        await store.close()
        lost = store_in(server, "bucket/a", deadline_s=0.5, endpoint_url="http://127.0.0.1:1")
        with pytest.raises(StorageError, match=r"127\.0\.0\.1:1.*given up"):
            await lost.probe()
        await lost.close()

    asyncio.run(main())


def test_missing_credentials_are_told(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")

    async def main() -> None:
        store = store_in(server, "bucket/a", key=None, secret=None)
        with pytest.raises(DeniedError, match="AWS_"):
            await store.list()
        await store.close()

    asyncio.run(main())
