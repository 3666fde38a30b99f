"""Upload slots: which uploads run at the same time, of one job and of several."""

import asyncio

from pannier.sidecar.upload.concurrency import MOST, UploadSlots


class Upload:
    """An upload that holds its slot until the test ends it."""

    def __init__(
        self, slots: UploadSlots, weight: int = 1, *, growing: bool = False, job: str = "job"
    ) -> None:
        self.growing = growing
        self.job = job
        self.running = False
        self._end = asyncio.Event()
        self._task = asyncio.create_task(self._run(slots, weight))

    async def _run(self, slots: UploadSlots, weight: int) -> None:
        async with slots.slot(weight, lambda: self.growing, self.job):
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


def test_a_job_never_takes_the_last_slot_from_others() -> None:
    async def check() -> None:
        slots = UploadSlots(1000)
        slots.share(True)
        greedy = [Upload(slots, job="a") for _ in range(2 * MOST)]
        await settle()
        assert sum(each.running for each in greedy) == MOST - 1
        late = Upload(slots, job="b")
        await settle()
        assert late.running
        for each in (late, *greedy):
            await each.end()

    asyncio.run(check())


def test_memory_is_left_for_one_more_of_others() -> None:
    async def check() -> None:
        slots = UploadSlots(100)
        slots.share(True)
        greedy = [Upload(slots, 30, job="a") for _ in range(3)]
        late = Upload(slots, 30, job="b")
        await settle()
        assert [each.running for each in greedy] == [True, True, False]
        assert late.running
        for each in (*greedy[:2], late, greedy[2]):
            await each.end()

    asyncio.run(check())


def test_the_job_with_the_fewest_uploads_goes_first() -> None:
    async def check() -> None:
        slots = UploadSlots(1000)
        slots.share(True)
        greedy = [Upload(slots, job="a") for _ in range(2 * MOST)]
        await settle()
        modest = [Upload(slots, job="b") for _ in range(MOST)]
        await settle()
        for turn in range(3):
            await greedy[turn].end()
            await settle()
        running = [each.job for each in (*greedy, *modest) if each.running]
        # Each free slot went to the job with fewer uploads, though the other had waited longer.
        assert (running.count("a"), running.count("b")) == (MOST // 2, MOST // 2)
        for each in (*greedy, *modest):
            await each.cancel()

    asyncio.run(check())


def test_a_single_job_has_all_slots() -> None:
    async def check() -> None:
        slots = UploadSlots(1000)
        uploads = [Upload(slots, job="a") for _ in range(2 * MOST)]
        await settle()
        assert sum(each.running for each in uploads) == MOST
        for each in uploads:
            await each.cancel()

    asyncio.run(check())
