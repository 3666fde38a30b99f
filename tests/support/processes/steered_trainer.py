"""A trainer that a test steers by files: ``<GO>/<step>-<rank>`` lets the rank save that step.

The file holds arguments as JSON: ``timeout``, ``mib``. It writes ``step 3 staged``, then
``step 3 committed`` or ``step 3 failed: …``, and ends when ``<GO>/end`` is there. With
``SIGTERM=exit`` in its environment it exits on SIGTERM as the README shows.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from pannier import client

GO = Path(os.environ["GO"])
ROOT = os.environ["ROOT"]


def say(text: str) -> None:
    # One write, so that lines of several threads don't mix.
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def save(step: int, rank: int, *, timeout: float = 60, mib: int = 1) -> None:
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
