"""One way of saving asynchronously, in a process of its own; prints one JSON object.

Started by ``peers.py``: ``python -m tests.bench.worker METHOD TARGET ...``. The stall lasts until
the state may change: the call, and the staging if that goes on after it. Then training steps run
until the save is durable.
"""

import argparse
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.bench.embedded import settle
from tests.bench.parts import WARM_UP
from tests.bench.timing import timed
from tests.bench.training import Copies, State, Training, change, make_state, start_rank
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

REST_S = 4.0
"""For what a peer does once, after its first saves: nothing shows when that has ended, and less time might favour us."""
Save = Callable[[State, str], tuple["Future[Any] | None", "Future[Any]"]]
"""Returns futures of the staging (None: it is over) and of the save."""


def pannier() -> Save:
    """Ours, as a training loop calls it."""
    from pannier import client

    return lambda state, target: (None, client.async_save(state, checkpoint_id=target))


def torch_async(kind: AsyncCheckpointerType, stager: DefaultStager | None = None) -> Save:
    """``dcp.async_save`` with torch's own writer for the place."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    def save(state: State, target: str) -> tuple[None, "Future[Any]"]:
        # In a bucket nothing is to be synced, and torch would call os.sync().
        bucket = "://" in target
        writer = FsspecWriter(target, sync_files=False) if bucket else FileSystemWriter(target)
        answer = async_save(
            state, storage_writer=writer, async_checkpointer_type=kind, async_stager=stager
        )
        assert isinstance(answer, Future)
        return None, answer

    return save


def torch_process_shared() -> Save:
    """The PROCESS mode with a stager that is kept, in shared memory.

    Pinning it needs CUDA: without, torch's stager ignores ``use_pinned_memory`` and refuses
    ``use_non_blocking_copy``.
    """
    options = StagingOptions(
        use_pinned_memory=torch.cuda.is_available(),
        use_shared_memory=True,
        use_async_staging=False,
        use_non_blocking_copy=torch.cuda.is_available(),
    )
    return torch_async(AsyncCheckpointerType.PROCESS, DefaultStager(options))


def torch_checkpointing() -> Save:
    """Meta's package of that name, as its documentation says for a CPU. Raises ImportError."""
    from torch_checkpointing import make_async_checkpoint_saver
    from torch_checkpointing.checkpoint_base import CheckpointBase, CheckpointItem
    from torch_checkpointing.config import AsyncCheckpointSaverConfig
    from torch_checkpointing.staging import CheckpointStagerConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    saver = make_async_checkpoint_saver(
        AsyncCheckpointSaverConfig(staging_config=staging),
        # Its default, O_DIRECT, ends with EINVAL on ext4: the pieces that it writes aren't aligned.
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    )

    class Checkpoint(CheckpointBase):  # type: ignore[misc]
        def __init__(self, state: State) -> None:
            self._state = state

        def get_items(self) -> dict[str, Any]:
            return {"model": CheckpointItem(self._state)}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise NotImplementedError

    def save(state: State, target: str) -> tuple["Future[Any]", "Future[Any]"]:
        staged, written = saver.save(target, Checkpoint(state))
        return staged, written

    return save


METHODS: dict[str, Callable[[], Save]] = {
    "pannier": pannier,
    "torch-thread": lambda: torch_async(AsyncCheckpointerType.THREAD),
    "torch-process": lambda: torch_async(AsyncCheckpointerType.PROCESS),
    "torch-process-shared": torch_process_shared,
    "torch-checkpointing": torch_checkpointing,
}


def peak_memory(*, reset: bool = False) -> int:
    """This process's peak resident bytes since the last reset (see proc(5), clear_refs)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def measure(method: str, target: str, state: State, saves: int) -> dict[str, Any]:
    """Seconds of stalls, of saves until durable, of copies between them, and of steps."""
    training, copies = Training(), Copies(state)
    before = peak_memory(reset=True)
    save = METHODS[method]()
    found: dict[str, list[float]] = {
        name: [] for name in ("stall_s", "durable_s", "memcpy_s", "quiet_step_s", "busy_step_s")
    }
    for number in range(WARM_UP + saves):
        place = f"{target}/step-{number}"
        change(state)
        found["memcpy_s"].append(timed(copies.copy)[0])
        change(state)

        def call(place: str = place) -> "Future[Any]":
            staged, written = save(state, place)
            if staged is not None:
                staged.result()
            return written

        stall, written = timed(call)
        rest, busy = timed(training.until, written.done)
        written.result()
        found["stall_s"].append(stall)
        found["durable_s"].append(stall + rest)
        if number >= WARM_UP:
            found["busy_step_s"] += busy
        if "://" not in target:
            shutil.rmtree(place)
            os.sync()
        if number >= WARM_UP:
            # As many without a save, in turns with those.
            found["quiet_step_s"] += training.steps(len(busy))
        elif number == WARM_UP - 1:
            # What a method does once, between saves.
            if method == "pannier":
                settle(Path(os.environ["PANNIER_RUNTIME_DIR"]))
            else:
                time.sleep(REST_S)
    counted = {
        name: values[WARM_UP:] if not name.endswith("step_s") else values
        for name, values in found.items()
    }
    return {
        **counted,
        "first_stall_s": found["stall_s"][0],
        "grown_bytes": peak_memory() - before,
    }


def main() -> None:
    """Measures and prints."""
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("target", help="directory or URL for the checkpoints")
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--saves", type=int, required=True)
    options = parser.parse_args()
    start_rank()
    state = make_state(options.bytes, options.tensors)
    result = measure(options.method, options.target, state, options.saves)
    print(json.dumps(result), flush=True)
    # Not by the interpreter's end: a peer's threads and processes may hang it up.
    dist.destroy_process_group()
    if options.method != "pannier":
        os._exit(0)


if __name__ == "__main__":
    main()
