"""Optimizers whose steps wait for deferred copies, and the tensors that only they change.

In: optimizers (``client.guard``) and deferred copies. Out: before each step of a guarded optimizer
the training stream waits, on the device, until its tensors are copied. Only tensors that nothing but
an optimizer changes may be deferred: its parameters and its state. A state dict doesn't show which of
its tensors are buffers, which the forward pass may change. Thread-safe.
"""

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from pannier.client import torch_compat
from pannier.client.staging import device_stream
from pannier.client.staging.deferred_copies import DeferredCopies
from pannier.client.staging.device_copy import DeviceCopies, MayDefer, device_tensors
from pannier.wire.errors import InvalidRequestError

_IN_BACKWARD = (
    "steps inside backward(): its parameters change while gradients of others are still computed, "
    "so no copy can overlap"
)


class Guard:
    """A guarded optimizer. A context manager: leaving it removes the guard."""

    def __init__(self, guards: "Guards", optimizer: torch.optim.Optimizer, *, wait: bool) -> None:
        self._guards = weakref.ref(guards)
        self._optimizer = weakref.ref(optimizer)
        self._wait = wait
        self.refusal = ""
        """Why copies can't overlap, as found in a step; human-readable."""
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; None when it is gone."""
        return self._optimizer()

    def remove(self) -> None:
        """Ends the guard: steps no longer wait, and its tensors are copied before ``async_save`` returns.

        The caller's stream waits here for copies under way, since later steps don't.
        """
        guards = self._guards()
        if self._wait and guards is not None and not device_stream.is_capturing():
            guards.make_stream_wait()
        self._hook.remove()
        if guards is not None:
            guards.discard(self)

    def __enter__(self) -> "Guard":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if device_stream.is_capturing():
            self.refusal = (
                f"{_name(optimizer)} is captured in a CUDA graph, whose replay waits for nothing"
            )
            return
        if torch_compat.backward_is_running():
            self.refusal = f"{_name(optimizer)} {_IN_BACKWARD}"
        guards = self._guards()
        if self._wait and guards is not None:
            guards.make_stream_wait()


class Guards:
    """The guarded optimizers of one client, and its deferred copies under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._guards: list[Guard] = []
        self._under_way: list[DeferredCopies] = []

    def add(self, optimizer: Any, *, wait: bool) -> Guard:
        """Guards an optimizer; see :meth:`pannier.client.Client.guard`."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidRequestError(
                f"guard: {type(optimizer).__name__} is no torch.optim.Optimizer; for a wrapper, "
                "give the optimizer it steps"
            )
        if any(map(torch_compat.steps_in_backward, _parameters(optimizer))):
            raise InvalidRequestError(f"guard: {_name(optimizer)} {_IN_BACKWARD}")
        guard = Guard(self, optimizer, wait=wait)
        with self._lock:
            self._guards.append(guard)
        return guard

    def discard(self, guard: Guard) -> None:
        """Forgets a guard, if it is known."""
        with self._lock:
            self._guards = [other for other in self._guards if other is not guard]

    def copies(self, staging: str) -> DeviceCopies:
        """The device copies of one save.

        Args:
            staging: ``"blocking"`` or ``"overlapped"``.

        Raises InvalidRequestError: overlapped, but an optimizer steps where no copy can overlap.
        """
        return DeviceCopies(self._may_defer() if staging == "overlapped" else None)

    def add_copies(self, copies: DeferredCopies) -> None:
        """Makes guarded optimizers wait for ``copies`` from now on."""
        with self._lock:
            self._under_way = [other for other in self._under_way if not other.done]
            self._under_way.append(copies)

    def make_stream_wait(self) -> None:
        """Makes work queued on the caller's stream from now on wait for all copies under way."""
        with self._lock:
            self._under_way = [copies for copies in self._under_way if not copies.done]
            under_way = list(self._under_way)
        for copies in under_way:
            copies.make_stream_wait()

    def _may_defer(self) -> MayDefer:
        with self._lock:
            self._guards = [guard for guard in self._guards if guard.optimizer is not None]
            guards = list(self._guards)
        refusal = next((guard.refusal for guard in guards if guard.refusal), "")
        if refusal:
            raise InvalidRequestError(f"staging='overlapped': {refusal}; use staging='blocking'")
        if not guards:
            return _requires_grad
        storages: set[int] = set()
        for guard in guards:
            if (optimizer := guard.optimizer) is not None:
                storages.update(_storages(optimizer))
        storages.discard(0)
        return lambda tensor: tensor.untyped_storage().data_ptr() in storages


def _requires_grad(tensor: torch.Tensor) -> bool:
    """Without a guard the loop itself waits before it steps: so parameters may be deferred."""
    if torch_compat.steps_in_backward(tensor):
        raise InvalidRequestError(
            f"staging='overlapped': the optimizer of a parameter of shape {tuple(tensor.shape)} "
            f"{_IN_BACKWARD}; use staging='blocking'"
        )
    return tensor.requires_grad


def _storages(optimizer: torch.optim.Optimizer) -> Iterator[int]:
    """Addresses of an optimizer's storages on devices with streams."""
    for value in (*_parameters(optimizer), optimizer.state):
        for tensor in device_tensors(value):
            yield tensor.untyped_storage().data_ptr()


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _name(optimizer: torch.optim.Optimizer) -> str:
    return f"the optimizer {type(optimizer).__name__}"
