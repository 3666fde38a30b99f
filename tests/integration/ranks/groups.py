"""Four ranks save in several groups, and drift apart in every way they can.

Ranks 0 and 1 are the group where rank 1 is at fault; ranks 2 and 3 save undisturbed beside
them. Environment: ROOT, REPORT (directory).
"""

import json
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from pannier import client

warnings.filterwarnings("ignore")
CULPRIT = 1
dist.init_process_group("gloo")
rank = dist.get_rank()
root = os.environ["ROOT"]
# Every rank makes every group.
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
crosses = [dist.new_group([0, 2]), dist.new_group([1, 3])]
alone = [dist.new_group([each]) for each in range(4)]
twins = [dist.new_group([0, 1]), dist.new_group([2, 3])]
"""Of the same ranks as `pairs`."""
pair, cross = pairs[rank // 2], crosses[rank % 2]
report: dict[str, Any] = {}


class Failing(DefaultSavePlanner):
    """Raises in one of its methods on the rank at fault."""

    def __init__(self, method: str, error: BaseException) -> None:
        super().__init__()
        self.method = method if rank == CULPRIT else ""
        self.error = error

    def create_local_plan(self) -> Any:
        self.fail("create_local_plan")
        return super().create_local_plan()

    def finish_plan(self, new_plan: Any) -> Any:
        self.fail("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        self.fail("resolve_data")
        return super().resolve_data(write_item)

    def fail(self, method: str) -> None:
        if method == self.method:
            raise self.error


class Gated(DefaultSavePlanner):
    """Stages once its event is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.opened = threading.Event(), threading.Event()

    def resolve_data(self, write_item: Any) -> Any:
        self.reached.set()
        assert self.opened.wait(60)
        return super().resolve_data(write_item)


class Broken:
    def state_dict(self) -> dict[str, Any]:
        raise LookupError("broken on purpose")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("broken on purpose")


def state(**more: Any) -> dict[str, Any]:
    return {f"weight.{rank}": torch.full((50,), float(rank)), "shared": torch.ones(20), **more}


def attempt(name: str, values: Any = None, **arguments: Any) -> dict[str, Any]:
    """How one save ended here."""
    arguments = {"checkpoint_id": f"{root}/{name}", "process_group": pair, **arguments}
    try:
        handle = client.async_save(state() if values is None else values, **arguments)
        return {"type": "", "attempt": handle.result(60).attempt}
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - it goes to the report
        failures = getattr(error, "failures", {})
        return {
            "type": type(error).__name__,
            "bases": [base.__name__ for base in type(error).__mro__],
            "message": "\n".join([str(error), *getattr(error, "__notes__", ())]),
            "failures": {str(number): failure.kind for number, failure in failures.items()},
        }


def busy(name: str, on_busy: str) -> dict[str, Any]:
    """A save of the pair while the rank at fault is staging as many as it may, by itself."""
    if rank != CULPRIT:
        return attempt(name)
    planners = [Gated(), Gated()]
    saves = [
        lambda i=i, planner=planner: attempt(  # type: ignore[misc]
            f"beside-{name}-{i}", process_group=alone[rank], planner=planner
        )
        for i, planner in enumerate(planners)
    ]
    found: dict[str, Any] = {}

    def middle() -> dict[str, Any]:
        for planner in planners:
            assert planner.reached.wait(60)
        found.update(attempt(name, on_busy=on_busy))
        for planner in planners:
            planner.opened.set()
        return found

    *others, found = in_threads(*saves, middle)
    return {**found, "others": others}


def at_fault(**arguments: Any) -> dict[str, Any]:
    return arguments if rank == CULPRIT else {}


def failing(method: str, error: BaseException | None = None) -> dict[str, Any]:
    return {"planner": Failing(method, error or LookupError("broken on purpose"))}


DRIFTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "skip": lambda name: busy(name, "skip"),
    "busy": lambda name: busy(name, "raise"),
    "create_local_plan": lambda name: attempt(name, **failing("create_local_plan")),
    "finish_plan": lambda name: attempt(name, **failing("finish_plan")),
    "resolve_data": lambda name: attempt(name, **failing("resolve_data")),
    "interrupt": lambda name: attempt(name, **failing("resolve_data", KeyboardInterrupt())),
    "state_dict": lambda name: attempt(name, state(**at_fault(stateful=Broken()))),
    "unpicklable": lambda name: attempt(name, state(**at_fault(thing=[Unpicklable()]))),
    "not a mapping": lambda name: attempt(name, 7 if rank == CULPRIT else None),
    "on_busy": lambda name: attempt(name, **at_fault(on_busy="later")),
    "timeout": lambda name: attempt(name, **at_fault(timeout=-1)),
    "stager": lambda name: attempt(name, **at_fault(async_stager=object())),
    "collectives": lambda name: attempt(name, **at_fault(use_collectives=False)),
    "writer": lambda name: attempt(name, **at_fault(storage_writer=object())),
    "no id": lambda name: attempt(name, **at_fault(checkpoint_id=None)),
    "malformed id": lambda name: attempt(name, **at_fault(checkpoint_id="gs://")),
    "other id": lambda name: attempt(name, **at_fault(checkpoint_id=f"{root}/elsewhere")),
}


def in_threads(*saves: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{} for _ in saves]
    threads = [
        threading.Thread(target=lambda i=i, save=save: found[i].update(save()))  # type: ignore[misc]
        for i, save in enumerate(saves)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


TWINS = [(f"first-{rank // 2}", pair), (f"second-{rank // 2}", twins[rank // 2])]


def several(name: str, group: Any) -> dict[str, Any]:
    """Saves one after the other, which the ranks begin in any order beside those of another thread."""
    found = []
    for number in range(5):
        time.sleep(0.02 * ((rank + len(name) + number) % 3))
        found.append(attempt(f"{name}-{number}", process_group=group))
    return {"saves": found}


def at_once() -> None:
    """Every rank is in three groups, whose saves are under way together."""
    handles = {
        name: client.async_save(
            state(), checkpoint_id=f"{root}/at-once/{name}", process_group=group
        )
        for name, group in (
            ("world", None),
            (f"pair-{rank // 2}", pair),
            (f"cross-{rank % 2}", cross),
        )
    }
    report["at once"] = {name: handle.result(60).attempt for name, handle in handles.items()}


def main() -> None:
    at_once()
    dist.barrier()
    report["good-0"] = attempt("good-0")
    for name, drift in DRIFTS.items():
        if rank in (0, CULPRIT):
            report[name] = drift(name)
            report[f"after {name}"] = attempt(f"after {name}")
        else:
            report[f"beside {name}"] = attempt(f"beside {name}")
    dist.barrier()
    # Ranks 2 and 3 have no part in the first pair: they were given a placeholder for it.
    report["outside"] = attempt("outside", process_group=pairs[0])
    dist.barrier()
    client.wait_all(60)
    report["threads"] = in_threads(
        lambda: attempt(f"threads-pair-{rank // 2}"),
        lambda: attempt(f"threads-cross-{rank % 2}", process_group=cross),
    )
    report["twins"] = in_threads(
        *(lambda name=name, group=group: several(f"twins-{name}", group) for name, group in TWINS)  # type: ignore[misc]
    )
    dist.barrier()
    client.close()
    (Path(os.environ["REPORT"]) / f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


main()
