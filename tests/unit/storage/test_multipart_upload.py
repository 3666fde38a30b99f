"""Parts of one S3 object that end in any order: pannier.storage.s3.multipart_upload."""

import asyncio
import random
from typing import Any

import pytest

from pannier.storage.base import Unfinished
from pannier.storage.http_body import Part
from pannier.storage.io_threads import BUFFER
from pannier.storage.retry import UploadLostError
from pannier.storage.s3.multipart_upload import MEMORY, MultipartUpload

PARTS = 25


class Reader:
    """A file of 25 parts, of which each has its number in all bytes; reading one takes a while."""

    size = PARTS * BUFFER - 1

    def __init__(self, order: random.Random) -> None:
        self._order = order

    async def fill(self, view: memoryview, offset: int) -> None:
        view[:1] = view[-1:] = bytes([offset // BUFFER])
        await turns(0, self._order)

    def crc32c(self, start: int, end: int) -> int:
        return start

    async def confirm(self) -> int:
        return 0


class Server:
    """Answers parts in any order, and notes what it was sent."""

    def __init__(self, order: random.Random) -> None:
        self._order = order
        self.uploads: set[str] = set()
        self.began = 0
        self.running = self.most = 0
        self.parts: list[dict[str, Any]] = []
        self.lost_at: list[int] = []
        """Numbers of parts at which it loses an upload."""

    async def __call__(self, operation: str, **arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = await getattr(self, operation)(**arguments)
        return answer

    async def create_multipart_upload(self, **_: Any) -> dict[str, Any]:
        self.began += 1
        self.uploads.add(str(self.began))
        return {"UploadId": str(self.began)}

    async def upload_part(
        self, *, Body: Part, PartNumber: int, UploadId: str, **_: Any
    ) -> dict[str, Any]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            # Longer than reading: several end while one part is read.
            await turns(12, self._order)
        finally:
            self.running -= 1
        if PartNumber in self.lost_at:
            self.lost_at.remove(PartNumber)
            raise UploadLostError(f"404 NoSuchUpload {UploadId}")
        assert Body[0] == Body[-1] == PartNumber - 1, "its buffer was filled again meanwhile"
        return {"ETag": f"{UploadId}-{PartNumber}"}

    async def complete_multipart_upload(
        self, *, MultipartUpload: dict[str, Any], UploadId: str, **_: Any
    ) -> dict[str, Any]:
        self.parts = MultipartUpload["Parts"]
        self.uploads.remove(UploadId)
        return {}

    async def abort_multipart_upload(self, *, UploadId: str) -> dict[str, Any]:
        self.uploads.remove(UploadId)
        return {}

    async def list(self) -> list[Unfinished]:
        return [Unfinished("file", 0, 0.0, token) for token in sorted(self.uploads)]


async def turns(least: int, order: random.Random) -> None:
    """Ends after ``least`` to ``least + 3`` turns of the event loop."""
    for _ in range(least + order.randrange(4)):
        await asyncio.sleep(0)


def upload(server: Server, reader: Reader) -> list[str]:
    """The reasons why it was begun again."""
    again: list[str] = []
    held: list[int] = []
    one = MultipartUpload(server, "s3://b/file", reader.size, server.list, again.append)
    reading: Any = reader
    asyncio.run(one.run(reading, held.append))
    assert held[-1] == reader.size
    return again


@pytest.mark.parametrize("seed", range(5))
def test_parts_that_end_together_never_take_a_buffer_that_is_in_use(seed: int) -> None:
    order = random.Random(seed)
    server = Server(order)
    assert upload(server, Reader(order)) == []
    assert [part["PartNumber"] for part in server.parts] == list(range(1, PARTS + 1))
    assert [part["ETag"] for part in server.parts] == [f"1-{n}" for n in range(1, PARTS + 1)]
    assert server.most <= MEMORY // BUFFER
    assert server.uploads == set()


def test_an_upload_that_the_server_has_lost_is_begun_again_from_the_first_part() -> None:
    order = random.Random(0)
    server = Server(order)
    server.lost_at = [3, 20]
    assert upload(server, Reader(order)) == ["404 NoSuchUpload 1", "404 NoSuchUpload 2"]
    assert [part["ETag"] for part in server.parts] == [f"3-{n}" for n in range(1, PARTS + 1)]
    assert server.uploads == set()


def test_a_server_that_loses_every_upload_ends_it_with_its_own_words() -> None:
    server = Server(random.Random(0))
    server.lost_at = [1, 1, 1]
    with pytest.raises(UploadLostError, match="404 NoSuchUpload 3"):
        upload(server, Reader(random.Random(0)))
    assert server.uploads == set()
