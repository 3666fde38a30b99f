"""The demo: train, save while training, kill the trainers, restore into another layout.

With ``--xla`` the trainer is an SPMD program of torch_xla, on virtual devices. Exit status 0 means
that everything in the closing table was seen to be true.
"""

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
from rich.console import Console
from rich.table import Table

from pannier.daemon.rank_phase import has_reached
from pannier.v1 import save_pb2, status_pb2, status_pb2_grpc
from pannier.wire.addresses import embedded_sidecar

HERE = Path(__file__).parent
SAVES = 3
RESTORED_STEPS = 3
DEADLINE_S = 240.0

console = Console(width=100, highlight=False)


@dataclass(frozen=True)
class Layout:
    """How the model is spread, and the program that trains it so."""

    name: str
    command: tuple[str, ...]
    """Of Python; the trainer's own arguments follow."""
    environment: Mapping[str, str] = field(default_factory=dict)
    save_every: int = 8
    """Steps."""


def fsdp(ranks: int) -> Layout:
    """FSDP2, a process for each rank."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return Layout(
        f"{ranks} rank{'s' if ranks > 1 else ''} (FSDP2)", (*launcher, str(HERE / "train.py"))
    )


def spmd(rows: int, columns: int) -> Layout:
    """torch_xla's SPMD on a mesh of virtual devices, all in one process."""
    return Layout(
        f"{rows} × {columns} XLA devices (SPMD)",
        (str(HERE / "train_xla.py"), f"--mesh={rows}x{columns}"),
        {
            "PJRT_DEVICE": "CPU",
            "CPU_NUM_DEVICES": str(rows * columns),
            "TF_CPP_MIN_LOG_LEVEL": "2",  # XLA's errors only.
        },
        save_every=4,
    )


class Trainer:
    """One run of a layout's program and its events, in a process group of its own."""

    def __init__(self, layout: Layout, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *layout.command, *arguments],
            env={
                **os.environ,
                **layout.environment,
                "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "ignore",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if "CI" in os.environ else None,
            text=True,
            start_new_session=True,
        )
        self._timer = threading.Timer(DEADLINE_S, self.kill)
        self._timer.start()

    def events(self) -> Iterator[dict[str, Any]]:
        """What rank 0 prints, until its end."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                yield json.loads(line)

    def kill(self) -> None:
        """SIGKILL to it and every rank."""
        self._timer.cancel()
        for process in psutil.Process(self.process.pid).children(recursive=True):
            process.kill()
        self.process.kill()
        self.process.wait()

    def wait(self) -> int:
        """Exit status; the deadline kills."""
        code = self.process.wait()
        self._timer.cancel()
        return code


class Progress(threading.Thread):
    """Follows the embedded sidecar's status and prints a line whenever a save moves."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._stub = status_pb2_grpc.StatusStub(grpc.insecure_channel(address))
        self.saves: dict[str, save_pb2.SaveStatus] = {}
        self._changed = threading.Condition()

    def run(self) -> None:
        """Polls as an operator would; the daemon may not be up yet."""
        shown: dict[str, str] = {}
        while True:
            try:
                saves = self._stub.ListSaves(status_pb2.ListSavesRequest(), timeout=5).saves
            except grpc.RpcError:
                saves = []
            with self._changed:
                for save in saves:
                    name = Path(save.checkpoint_id).name
                    self.saves[name] = save
                    line = _line(name, save)
                    if shown.get(name) != line:
                        shown[name] = line
                        console.print(line)
                self._changed.notify_all()
                self._changed.wait(0.02)

    def wait_for(self, name: str, what: Callable[[save_pb2.SaveStatus], bool]) -> float:
        """Seconds until ``what`` is true of the save; raises TimeoutError."""
        begun = time.monotonic()
        with self._changed:
            reached = self._changed.wait_for(
                lambda: name in self.saves and what(self.saves[name]), DEADLINE_S / 2
            )
        if not reached:
            raise TimeoutError(f"{name} hangs: {self.saves.get(name)}")
        return time.monotonic() - begun


def planned(save: save_pb2.SaveStatus) -> bool:
    """The coordinator has no part in it any more, until the commit: it has confirmed the plan by which ranks went."""
    # By its state, ranks may be staging by a plan that isn't confirmed yet.
    return bool(save.attempt) and save.planned_s > 0


def ingested(save: save_pb2.SaveStatus) -> bool:
    """Every rank's bytes are in the spool."""
    return all(has_reached(rank.phase, save_pb2.RANK_PHASE_INGESTED) for rank in save.ranks)


def committed(save: save_pb2.SaveStatus) -> bool:
    """The checkpoint is there."""
    return save.state == save_pb2.SAVE_STATE_COMMITTED


def _line(name: str, save: save_pb2.SaveStatus) -> str:
    state = save_pb2.SaveState.Name(save.state).removeprefix("SAVE_STATE_").lower()
    bars = []
    for rank in sorted(save.ranks, key=lambda rank: rank.rank):
        full = rank.bytes_staged or 1
        done = min(10, 5 * rank.bytes_ingested // full + 5 * rank.bytes_durable // full)
        bars.append(f"rank {rank.rank} {'█' * done}{'·' * (10 - done)}")
    return f"    [dim]save {name:<8} {state:<10} {'  '.join(bars)}[/dim]"


def _coordinator() -> psutil.Process:
    runtime = os.environ["PANNIER_RUNTIME_DIR"]
    for process in psutil.process_iter(["cmdline", "environ"]):
        command = process.info["cmdline"] or []
        here = (process.info["environ"] or {}).get("PANNIER_RUNTIME_DIR") == runtime
        if here and "coordinator" in command:
            return process
    raise RuntimeError("the embedded coordinator is not running")


def _stop_daemons() -> None:
    runtime = os.environ["PANNIER_RUNTIME_DIR"]
    daemons = [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if "pannier.cli" in " ".join(process.info["cmdline"] or [])
        and (process.info["environ"] or {}).get("PANNIER_RUNTIME_DIR") == runtime
    ]
    for process in daemons:
        process.terminate()
    for process in psutil.wait_procs(daemons, timeout=10)[1]:
        process.kill()


def demo(workplace: Path, progress: Progress, layout: Layout, other: Layout) -> bool:
    """Runs the three acts: trains in one layout, restores in the other.

    Returns whether all of it was true.
    """
    root = workplace / "checkpoints"

    console.print(f"\n[bold]1. Training on {layout.name}, a save every {layout.save_every} steps")
    trainer = Trainer(
        layout, "--root", str(root), "--steps=1000", f"--save-every={layout.save_every}"
    )
    steps: dict[bool, list[float]] = {True: [], False: []}
    stalls: list[float] = []
    kill_at = SAVES * layout.save_every
    losses: dict[int, float] = {}
    last = ""
    coordinator: psutil.Process | None = None
    for event in trainer.events():
        if event["event"] == "step":
            losses[event["step"]] = event["loss"]
            if event["step"] > 1:
                steps[event["saving"]].append(event["seconds"])
            console.print(
                f"  step {event['step']:>3}  loss {event['loss']:.4f}  "
                f"{event['seconds'] * 1e3:6.0f} ms{'  (save in flight)' if event['saving'] else ''}"
            )
            if last:
                break
        elif event["event"] == "save":
            stalls.append(event["stall"])
            console.print(f"  save {event['step']:>3}  stalled {event['stall'] * 1e3:.0f} ms")
            if event["step"] >= kill_at:
                # So that this save can't be committed before the trainers are dead. On a very
                # fast disk it already is: then it is the next one's turn.
                coordinator = coordinator or _coordinator()
                progress.wait_for(f"step-{event['step']}", planned)
                coordinator.suspend()
                if (root / f"step-{event['step']}" / ".metadata").exists():
                    coordinator.resume()
                else:
                    last, kill_at = f"step-{event['step']}", event["step"]
    if coordinator is None or not last:
        console.print("[red]training ended before its time")
        return False

    console.print("\n[bold]2. SIGKILL to all trainers, once the last save is ingested")
    try:
        progress.wait_for(last, ingested)
        trainer.kill()
        unseen = not (root / last / ".metadata").exists()
    finally:
        coordinator.resume()
    committed_after = progress.wait_for(last, committed)
    visible = (root / last / ".metadata").exists()
    console.print(f"  trainers are gone; {last} was committed {committed_after:.1f} s later")
    verify = subprocess.run(
        [sys.executable, "-m", "pannier.cli", "verify", str(root / last)], capture_output=True
    )

    console.print(f"\n[bold]3. Restored on {other.name}, from the checkpoint of {layout.name}")
    restore = Trainer(
        other,
        *("--root", str(root), "--restore", str(root / last)),
        f"--steps={kill_at + RESTORED_STEPS}",
    )
    restored: dict[int, float] = {}
    sources: dict[str, int] = {}
    for event in restore.events():
        if event["event"] == "restored":
            sources = event["files"]
        elif event["event"] == "step":
            restored[event["step"]] = event["loss"]
            console.print(f"  step {event['step']:>3}  loss {event['loss']:.4f}")
    exit_code = restore.wait()
    following = kill_at + 1
    continues = exit_code == 0 and math.isclose(
        restored.get(following, math.inf), losses[following], rel_tol=1e-3
    )

    def milliseconds(values: list[float]) -> str:
        return f"{statistics.median(values) * 1e3:.0f} ms" if values else "none seen"

    table = Table("what", "seen", "", title="Pannier demo")
    checks = [
        ("step, no save in flight (median)", milliseconds(steps[False]), None),
        ("step, save in flight (median)", milliseconds(steps[True]), None),
        (
            "stall of each save",
            ", ".join(f"{s * 1e3:.0f} ms" for s in stalls),
            len(stalls) >= SAVES,
        ),
        ("not committed when the trainers died", str(unseen), unseen),
        ("committed without them", f"after {committed_after:.1f} s", visible),
        ("bytes in storage equal the receipts", "pannier verify", verify.returncode == 0),
        (
            "data files that the restore read",
            ", ".join(f"{count} {source}" for source, count in sources.items()),
            sources.keys() == {"own spool"},
        ),
        (
            f"loss of step {following}, before and after",
            f"{losses[following]:.5f}, {restored.get(following, math.nan):.5f}",
            continues,
        ),
    ]
    for what, seen, true in checks:
        table.add_row(what, seen, "" if true is None else "[green]✓" if true else "[red]✗")
    console.print()
    console.print(table)
    return all(true is not False for _, _, true in checks)


def main() -> int:
    """Sets a private place up, runs the demo, takes it down again."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--xla", action="store_true", help="train with torch_xla")
    layouts = (spmd(4, 1), spmd(2, 4)) if parser.parse_args().xla else (fsdp(2), fsdp(1))
    with tempfile.TemporaryDirectory(prefix="pannier-demo-") as directory:
        workplace = Path(directory)
        os.environ["PANNIER_RUNTIME_DIR"] = str(workplace / "run")
        os.environ["PANNIER_SPOOL"] = str(workplace / "spool")
        progress = Progress(embedded_sidecar(workplace / "run"))
        progress.start()
        try:
            return 0 if demo(workplace, progress, *layouts) else 1
        finally:
            _stop_daemons()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
