"""Saves every kind of state, then restores each that programs with other numbers of devices have saved.

Environment: ROOT (of the checkpoints), REPORT (directory), WORLDS (JSON: all numbers of devices; their
programs run at the same time and wait for each other once), KINDS (JSON).
"""

import json
import os
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch_xla
import torch_xla.runtime as xr

from pannier import client
from support.states.bits import differences, overwrite
from support.states.xla_states import (
    AFTER,
    BEFORE,
    KINDS,
    Kind,
    Layout,
    on_host,
    shardings,
    tensors,
)

SEED, OTHER = 3, 987
ROOT, REPORT = Path(os.environ["ROOT"]), Path(os.environ["REPORT"])
NAMES = json.loads(os.environ["KINDS"])

xr.use_spmd()
layout = Layout()


def save(kind: Kind, directory: Path) -> list[str]:
    """What is wrong with a save; nothing of what follows it may come into the checkpoint."""
    state = layout.place(kind, SEED, BEFORE)
    specs = shardings(state)
    handle = client.async_save(state, checkpoint_id=directory)
    found = [f"changed: {text}" for text in differences(on_host(state), kind.values(SEED))]
    if shardings(state) != specs:
        found.append(f"its shardings are {shardings(state)} instead of {specs}")
    for tensor in tensors(state):
        with torch.no_grad():
            tensor.logical_not_()
    torch_xla.sync()
    overwrite(without_xla(state))
    handle.result(60)
    return found


def restore(kind: Kind, directory: Path) -> list[str]:
    """What is wrong with what was restored into the other layout."""
    state = layout.place(kind, OTHER, AFTER)
    torch_xla.sync()
    own, specs = [id(tensor) for tensor in tensors(state)], shardings(state)
    client.load(state, checkpoint_id=directory)
    found = differences(on_host(state), kind.values(SEED))
    if [id(tensor) for tensor in tensors(state)] != own:
        found.append("tensors are others than before")
    if shardings(state) != specs:
        found.append(f"its shardings are {shardings(state)} instead of {specs}")
    return found


def without_xla(value: Any) -> Any:
    """A state's containers and what is on the host of it."""
    if isinstance(value, dict):
        return {k: without_xla(v) for k, v in value.items() if not tensors(v) or type(v) is dict}
    return value


def checked(check: Any, *arguments: Any) -> list[str]:
    try:
        found: list[str] = check(*arguments)
    except Exception:  # noqa: BLE001 - it goes to the report
        return [traceback.format_exc()]
    return found


def main() -> None:
    saved = {name: checked(save, KINDS[name], ROOT / str(layout.devices) / name) for name in NAMES}
    client.close()
    (REPORT / f"{layout.devices}-saved.json").write_text(json.dumps(saved))
    worlds = json.loads(os.environ["WORLDS"])
    deadline = time.monotonic() + 120
    while not all((REPORT / f"{number}-saved.json").exists() for number in worlds):
        assert time.monotonic() < deadline, "a program with another number of devices is missing"
        time.sleep(0.1)
    restored = {
        f"{name}|{writers}": checked(restore, KINDS[name], ROOT / str(writers) / name)
        for name in NAMES
        for writers in worlds
    }
    (REPORT / f"{layout.devices}-restored.json").write_text(json.dumps(restored))


main()
