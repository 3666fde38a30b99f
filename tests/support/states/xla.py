"""SPMD programs on torch_xla's CPU backend, each in a process of its own.

How many devices there are is settled when torch_xla is imported, and the import takes 6 to 8 seconds:
several checks that need the same number share a process (:func:`run_checks`).
"""

import importlib.util
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence

from support.processes.ranks import Finished, Ranks, Script, start_ranks

AVAILABLE = importlib.util.find_spec("torch_xla") is not None
"""Whether this environment has torch_xla (``make test-xla`` makes one)."""

DEVICES = (1, 4, 8)
"""Numbers of virtual devices that are tested."""

_IN_TURN = """
import sys
import traceback

import torch_xla.runtime as xr

xr.use_spmd()
failed = False
for check in [{checks}]:
    try:
        check()
    except Exception:
        traceback.print_exc()
        failed = True
    else:
        print("passed", check.__name__, flush=True)
sys.exit(failed)
"""


def environment(devices: int) -> dict[str, str]:
    """What makes a program see ``devices`` virtual devices of the CPU backend."""
    return {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}


def start_program(
    script: Script,
    devices: int,
    env: Mapping[str, str] = {},
    *,
    processes: int = 1,
    rank_env: Callable[[int], Mapping[str, str]] | None = None,
) -> Ranks:
    """Starts a program.

    Args:
        script: a file, source text, or a function without arguments that imports all it uses.
        devices: that each process sees.
        env: added to a clean environment: ``daemons.env()``, or nothing with the ``embedded``
            fixture.
        processes: with the variables that ``init_process_group`` reads; a single one needn't call it.
        rank_env: more variables by rank.
    """
    own = {**environment(devices), "TF_CPP_MIN_LOG_LEVEL": "2"}  # XLA's errors only.
    # torch_xla reads its environment when torch is imported.
    return start_ranks(
        script, processes, {**own, **env}, torchrun=False, rank_env=rank_env, forked=False
    )


def run_program(
    script: Script,
    devices: int,
    env: Mapping[str, str] = {},
    timeout: float = 240,
    *,
    processes: int = 1,
    rank_env: Callable[[int], Mapping[str, str]] | None = None,
) -> Finished:
    """Runs a program to its end; arguments as of :func:`start_program`.

    Raises AssertionError with all outputs unless every process exits with 0 within
    ``timeout`` seconds; nothing of them is left then.
    """
    with start_program(script, devices, env, processes=processes, rank_env=rank_env) as running:
        return running.wait(timeout).check()


def run_checks(
    checks: Sequence[Callable[[], object]],
    devices: int,
    env: Mapping[str, str] = {},
    timeout: float = 240,
) -> set[str]:
    """Several functions in one process with SPMD mode on, one after the other.

    Functions import all they use. Returns the names of those that passed; tracebacks of the others
    are printed.
    """
    source = "\n\n".join(textwrap.dedent(inspect.getsource(check)) for check in checks)
    names = ", ".join(check.__name__ for check in checks)
    with start_program(f"{source}\n{_IN_TURN.format(checks=names)}", devices, env) as running:
        finished = running.wait(timeout)
    output = finished.outputs[0]
    if any(finished.returncodes):
        print(output)
    return {check.__name__ for check in checks if f"passed {check.__name__}\n" in output}
