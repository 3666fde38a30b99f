"""A save by the last plan, as most are: what it costs the training loop is counted, not timed."""

import json
from pathlib import Path

from support.processes.cli import run_python
from support.processes.daemons import Daemons, clean_environment

MOST_MODULES = 40
"""Of the client, from the call to the commit."""

TRAINER = """
import json, sys, threading

counting, modules, rpcs, waits = False, set(), [], 0

def profile(frame, event, argument):
    if counting and event == "call":
        _, ours, module = frame.f_code.co_filename.partition("/pannier/client/")
        if ours:
            modules.add(module)

# Also of threads that were started before the save.
threading.setprofile(profile)
sys.setprofile(profile)

import torch
from grpc._channel import Channel

class Counted:
    def __init__(self, method, call):
        self.method, self.real = method, call

    def __call__(self, *args, **kwargs):
        rpcs.append(self.method)
        return self.real(*args, **kwargs)

    def future(self, *args, **kwargs):
        rpcs.append(self.method)
        return self.real.future(*args, **kwargs)

def count(kind):
    make = getattr(Channel, kind)
    setattr(Channel, kind, lambda self, method, *a, **k: Counted(method, make(self, method, *a, **k)))

for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
    count(kind)

from pannier.client import Client
from pannier.client.engine import Engine

call = Engine.call

def counted(engine, work):
    global waits
    if threading.current_thread() is threading.main_thread():
        waits += 1
    return call(engine, work)

Engine.call = counted

with Client() as client:
    def save(step):
        state = {"w": torch.full((1000,), float(step)), "notes": {"step": step}}
        return client.async_save(
            state, checkpoint_id=f"{sys.argv[1]}/step-{step}", extra_files={"config.json": b"{}"}
        )

    for step in range(3):
        save(step).result()
    del rpcs[:]
    waits, counting = 0, True
    handle = save(3)
    waited = waits
    handle.result()
    counting = False
    made = [each.rpartition("/")[2] for each in rpcs]
    counts = {"waits": waited, "rpcs": [each for each in made if each != "Ping"], "modules": sorted(modules)}
print(json.dumps(counts))
"""


def test_a_save_by_the_last_plan_waits_for_the_loop_once_and_makes_one_request(
    tmp_path: Path,
) -> None:
    with Daemons(tmp_path, allow=[str(tmp_path)]) as daemons:
        env = clean_environment(daemons.env())
        ended = run_python(TRAINER, str(tmp_path / "root"), env=env)
    assert ended.code == 0, ended
    counts = json.loads(ended.out.splitlines()[-1])
    assert counts["rpcs"] == ["HandOver"]
    assert counts["waits"] == 1
    assert len(counts["modules"]) <= MOST_MODULES, counts["modules"]
