"""Upload slots: which uploads run at the same time."""

import asyncio

from pannier.sidecar.upload.concurrency import MOST, UploadSlots


class Upload:
    """An upload that holds its slot until the test ends it."""

    def __init__(self, slots: UploadSlots, weight: int = 1, *, growing: bool = False) -> None:
        self.growing = growing
        self.running = False
        self._end = asyncio.Event()
        self._task = asyncio.create_task(self._run(slots, weight))

    async def _run(self, slots: UploadSlots, weight: int) -> None:
        async with slots.slot(weight, lambda: self.growing):
            self.running = True
            await self._end.wait()
        self.running = False

    async def end(self) -> None:
        self._end.set()
        await self._task

    async def cancel(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_uploads_stay_within_the_memory() -> None:
    async def check() -> None:
        slots = UploadSlots(3)
        uploads = [Upload(slots, 1, growing=False) for _ in range(5)]
        await settle()
        assert [u.running for u in uploads] == [True, True, True, False, False]
        await uploads[1].end()
        await settle()
        assert [u.running for u in uploads] == [True, False, True, True, False]
        await uploads[4].cancel()
        for index in (0, 2, 3):
            await uploads[index].end()

    asyncio.run(check())


def test_one_upload_runs_however_large_its_buffers_are() -> None:
    async def check() -> None:
        slots = UploadSlots(3)
        first, second = Upload(slots, 10, growing=False), Upload(slots, 10, growing=False)
        await settle()
        assert (first.running, second.running) == (True, False)
        await first.end()
        await settle()
        assert second.running
        await second.end()

    asyncio.run(check())


def test_growing_files_leave_room_for_complete_ones() -> None:
    async def check() -> None:
        slots = UploadSlots(100)
        growing = [Upload(slots, 1, growing=True) for _ in range(MOST)]
        complete = [Upload(slots, 1, growing=False) for _ in range(MOST)]
        await settle()
        assert sum(u.running for u in growing) == MOST // 2
        assert sum(u.running for u in complete) == MOST // 2
        # One that waited has become complete: it may take a place that is free.
        await complete[0].end()
        growing[-1].growing = False
        slots.admit()
        await settle()
        assert sum(u.running for u in growing + complete) == MOST
        for upload in growing + complete:
            await upload.cancel()

    asyncio.run(check())
