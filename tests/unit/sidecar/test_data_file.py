"""A data file in the spool: readers that wait for bytes, and checksums of parts."""

import asyncio
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import crc32c
import pytest

from pannier.sidecar.spool.data_file import DataFile, SpoolSource
from pannier.sidecar.spool.spool import Spool
from pannier.wire import chunk_codec, errors
from pannier.wire.chunk_codec import Checksums, ReceivedChunk
from support.processes.daemons import memory_directory
from support.processes.stretch import BOUND_S

MIB = 1 << 20


@pytest.fixture
def memory() -> Iterator[Path]:
    made = memory_directory()
    yield made
    shutil.rmtree(made)


def test_readers_wait_for_exactly_what_they_need(memory: Path) -> None:
    async def read_while_it_fills() -> None:
        spool = Spool(memory / "spool")
        file = DataFile("f", 10, spool.take("job", 10), label="f")
        source = SpoolSource(file)
        writer = object()
        await file.begin(writer, lambda: None)
        early = asyncio.create_task(source.wait_for(4))
        late = asyncio.create_task(source.wait_for(10))

        async def append(offset: int, data: bytes) -> None:
            chunk = ReceivedChunk(offset, crc32c.crc32c(data), memoryview(data))
            await file.append(writer, chunk)

        await append(0, b"abcd")
        await asyncio.wait_for(early, BOUND_S)
        assert not late.done()
        await append(4, b"efghij")
        await asyncio.wait_for(late, BOUND_S)
        found = Checksums().followed_by(memoryview(b"abcdefghij"))
        assert (file.checksums, source.path.read_bytes()[:10]) == (found, b"abcdefghij")
        source.confirm(found)
        with pytest.raises(errors.IntegrityError, match="the sender's is"):
            source.confirm(Checksums().followed_by(memoryview(b"abcdefghiJ")))
        spool.close()

    asyncio.run(read_while_it_fills())


def test_readers_of_a_released_file_get_an_error(memory: Path) -> None:
    async def release_while_it_is_read() -> None:
        spool = Spool(memory / "spool")
        file = DataFile("f", 10, spool.take("job", 10), label="file f")
        cut = []
        await file.begin(object(), lambda: cut.append(1))
        reading = asyncio.create_task(SpoolSource(file).wait_for(4))
        await asyncio.sleep(0)
        spool_file = await file.release()
        assert spool_file is not None
        assert await file.release() is None
        assert cut == [1]
        with pytest.raises(errors.UnavailableError, match="file f: its save has ended or failed"):
            await asyncio.wait_for(reading, BOUND_S)
        spool.close()

    asyncio.run(release_while_it_is_read())


@pytest.mark.parametrize("length", [1, 7, 4096, MIB, 3 * MIB + 5])
def test_the_checksum_of_a_whole_comes_from_its_parts(length: int) -> None:
    generator = random.Random(length)
    first, second = generator.randbytes(1000), generator.randbytes(length)
    combined = chunk_codec.combine_crc32c(crc32c.crc32c(first), crc32c.crc32c(second), length)
    assert combined == crc32c.crc32c(first + second)
