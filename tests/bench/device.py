"""Tensors of a GPU: what ``async_save`` costs against pinned copies of the same bytes.

Save and copy take turns in one process. The copy goes from each tensor to pinned memory of its own,
queued all together and waited for once. Steps are matrix products on the device; every tenth
is the optimizer's too, and waits for the copy (``client.guard``). Without a GPU it says so, and measures nothing.
"""

import statistics
from typing import Any

import torch
from tests.bench.embedded import Place, Ways, rest
from tests.bench.parts import GIB, WARM_UP, Row, arguments, finish, parsed, say, sized
from tests.bench.timing import milliseconds, percentile, ratio, timed
from tests.bench.training import State

ALLOWED_RATIO = 1.05
ALLOWED_CALL_S = 0.005
SKIPPED = "skipped: no GPU"
STALL = "blocking time of `async_save`, tensors on a GPU"
CALL = 'call of `async_save(staging="overlapped")`, tensors on a GPU'
STEPS = "training steps on the GPU while an overlapped save is in flight"


class Loop:
    """A state that is one optimizer's, with steps of about 5 ms."""

    def __init__(self, size: int, tensors: int) -> None:
        elements = size // tensors // 4
        self.parameters = [
            torch.nn.Parameter(torch.full((elements,), number + 0.5, device="cuda"))
            for number in range(tensors)
        ]
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer = torch.optim.SGD(self.parameters, lr=1.0, foreach=True)
        self._a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        self._products = 1
        self.step()
        alone = statistics.median(self.step() for _ in range(20))
        self._products = max(1, round(0.005 / alone))

    def state(self) -> State:
        return {f"layer.{i}": value.detach() for i, value in enumerate(self.parameters)}

    def step(self, optimize: bool = False) -> float:
        """Seconds of one step, until the device has done it."""
        return timed(self._step, optimize)[0]

    def _step(self, optimize: bool) -> None:
        for _ in range(self._products):
            torch.mm(self._a, self._a)
        if optimize:
            self.optimizer.step()
        torch.cuda.synchronize()


class PinnedCopies:
    """Pinned memory for each tensor, touched before."""

    def __init__(self, state: State) -> None:
        self._pairs = [
            (torch.empty(value.shape, pin_memory=True).fill_(0), value) for value in state.values()
        ]

    def copy(self) -> None:
        for target, source in self._pairs:
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()


def measure(size: int, tensors: int, transport: str, saves: int) -> dict[str, Any]:
    """Seconds of calls, copies and steps."""
    from pannier import client

    loop = Loop(size, tensors)
    copies = PinnedCopies(loop.state())
    found: dict[str, Any] = {"copied_s": [], "stalled_s": [], "called_s": [], "staged_s": []}
    quiet: list[float] = []
    beside: list[float] = []
    ways, how = Ways(), ""
    with Place(transport) as place, client.guard(loop.optimizer):

        def save(target: str, staging: str) -> tuple[float, Any]:
            loop.step(optimize=True)
            return timed(client.async_save, loop.state(), checkpoint_id=target, staging=staging)

        for number in range(WARM_UP + saves):
            counted = number >= WARM_UP
            copied = timed(copies.copy)[0]
            with place.checkpoint(f"blocking-{number}") as target:
                stalled, handle = save(target, "blocking")
                ways.add(handle)
                how = handle.status().staging
                handle.result()
            rest()
            with place.checkpoint(f"overlapped-{number}") as target:
                called, handle = save(target, "overlapped")
                steps = [loop.step()]
                while not handle.done():
                    steps.append(loop.step(optimize=len(steps) % 10 == 9))
                copy = handle.result().seconds["copy"]
            rest()
            alone = [loop.step(optimize=index % 10 == 9) for index in range(len(steps))]
            if counted:
                found["copied_s"].append(copied)
                found["stalled_s"].append(stalled)
                found["called_s"].append(called)
                found["staged_s"].append(copy)
                beside += steps
                quiet += alone
    for name, share in (("median", 0.5), ("p99", 0.99)):
        found[f"step_{name}_ratio"] = percentile(beside, share) / percentile(quiet, share)
        found[f"quiet_step_{name}_s"] = percentile(quiet, share)
    return found | {
        "steps": len(beside),
        "staging": how,
        "note": ways.note(transport),
        "device": torch.cuda.get_device_name(),
    }


def rows(found: dict[str, Any], options: Any) -> list[Row]:
    """The three of them."""
    size = sized(options.bytes)
    copied = statistics.median(found["copied_s"])
    stalled = statistics.median(found["stalled_s"])
    called = statistics.median(found["called_s"])
    return [
        Row(
            f"{STALL}, {size}",
            f"≤ {ALLOWED_RATIO} × a pinned copy",
            str(ratio(found["stalled_s"], found["copied_s"])),
            stalled <= ALLOWED_RATIO * copied,
            f"{milliseconds(stalled)}, copy {milliseconds(copied)} "
            f"({options.bytes / GIB / copied:.1f} GiB/s), {found['device']}, "
            f"{found['staging']}{found['note']}",
        ),
        Row(
            f"{CALL}, {size}",
            f"≤ {milliseconds(ALLOWED_CALL_S)}",
            milliseconds(called),
            called <= ALLOWED_CALL_S,
            f"staged after {milliseconds(statistics.median(found['staged_s']))}",
        ),
        Row(
            f"{STEPS}, {size}",
            "",
            f"median {found['step_median_ratio']:.2f} ×, p99 {found['step_p99_ratio']:.2f} ×",
            None,
            f"quiet {milliseconds(found['quiet_step_median_s'])}, {found['steps']} steps",
        ),
    ]


def main() -> None:
    options = parsed(arguments(__doc__))
    if not torch.cuda.is_available():
        targets = (f"≤ {ALLOWED_RATIO} × a pinned copy", f"≤ {milliseconds(ALLOWED_CALL_S)}", "")
        skipped = zip((STALL, CALL, STEPS), targets, strict=True)
        finish(options, [Row(what, target, SKIPPED) for what, target in skipped], {})
        return
    say(f"device, {options.transport}, {sized(options.bytes)}")
    found = measure(options.bytes, options.tensors, options.transport, options.saves)
    finish(options, rows(found, options), found)


if __name__ == "__main__":
    main()
