"""A trainer that a test steers by files: ``<GO>/<step>-<rank>`` lets the rank save that step.

The file holds arguments as JSON: ``timeout``, ``mib``, ``stop_at``. It writes ``step 3 staged``, then
``step 3 committed`` or ``step 3 failed: …``, and ends when ``<GO>/end`` is there. With
``SIGTERM=exit`` in its environment it exits on SIGTERM as the README shows.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pannier import client
from pannier.client.transport.file_stream import FileSource

GO = Path(os.environ["GO"])
ROOT = os.environ["ROOT"]


def say(text: str) -> None:
    # One write, so that lines of several threads don't mix.
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def stop_at_chunk(number: int) -> None:
    """Stops this process, as SIGSTOP does, when so many chunks of a file were sent."""
    chunks = FileSource.chunks

    def stopping(source: FileSource, start: int) -> Iterator[Any]:
        for index, chunk in enumerate(chunks(source, start)):
            if index == number:
                os.kill(os.getpid(), signal.SIGSTOP)
            yield chunk

    FileSource.chunks = stopping  # type: ignore[method-assign]


def save(step: int, rank: int, *, timeout: float = 60, mib: int = 1, stop_at: int = 0) -> None:
    if stop_at:
        stop_at_chunk(stop_at)
    state = {f"w{rank}": torch.full((mib << 18,), float(step))}
    try:
        handle = client.async_save(state, checkpoint_id=f"{ROOT}/step-{step}", timeout=timeout)
    except client.PannierError as error:
        say(f"step {step} failed: {error}")
        return
    say(f"step {step} staged")

    def wait() -> None:
        try:
            handle.result()
            say(f"step {step} committed")
        except client.PannierError as error:
            say(f"step {step} failed: {error}")

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    rank = int(os.environ.get("RANK", "0"))
    if os.environ.get("SIGTERM") == "exit":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    say("ready")
    step = 1
    while not (GO / "end").exists():
        order = GO / f"{step}-{rank}"
        if not order.exists():
            time.sleep(0.01)
            continue
        save(step, rank, **json.loads(order.read_text()))
        step += 1


if __name__ == "__main__":
    main()
