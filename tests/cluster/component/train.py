"""What the pods of test-cluster run under torchrun: steps of 0.1 s, and a save of 8 MiB per rank every 2 s, until SIGTERM."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from pannier import client

Path(f"/tmp/rank-{os.environ['LOCAL_RANK']}.pid").write_text(str(os.getpid()))
dist.init_process_group("gloo")
root, rank = os.environ["ROOT"], dist.get_rank()
state = {f"w{rank}": torch.zeros(1 << 21), "step": 0}
if newest := client.latest(root, include="ingested"):
    client.load(state, checkpoint_id=newest)
print("resumes after step", state["step"], flush=True)

notices: list[str] = []
signal.signal(signal.SIGTERM, lambda *_: notices.append("preempted"))

step = state["step"]
while True:
    step += 1
    state["step"] = step
    state[f"w{rank}"] += 1
    time.sleep(0.1)
    stop = torch.tensor(len(notices))
    dist.all_reduce(stop)
    if step % 20 == 0 or stop:
        client.async_save(state, checkpoint_id=f"{root}/step-{step}", on_busy="wait")
    if stop:
        client.close(timeout=20)
        print("leaves at step", step, flush=True)
        raise SystemExit(143)
