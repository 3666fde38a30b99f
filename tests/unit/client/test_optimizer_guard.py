"""Guarded optimizers: their steps wait for copies, and only what they change is copied late."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.optim import _apply_optimizer_in_backward

from pannier.client.staging.arena import ArenaPool
from pannier.client.staging.bounce_buffers import TensorCopy
from pannier.client.staging.deferred_copies import DeferredCopies
from pannier.client.staging.device_copy import DeviceCopies
from pannier.client.staging.optimizer_guard import Guards
from pannier.wire.errors import InvalidRequestError
from support.states.host_streams import FakeStream, fake_backend, host_as_device


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with host_as_device(monkeypatch):
        yield


class Loop:
    """A model with a buffer, and its optimizer."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.stream = FakeStream()
        self.pool = ArenaPool(2)
        self.step()

    def backward(self) -> None:
        self.model(torch.randn(4, 300)).square().sum().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        state = dict(self.model.state_dict())
        for number, found in self.optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{number}.{key}": value for key, value in found.items()}
        return state

    def begin(self, copies: DeviceCopies, state: dict[str, torch.Tensor]) -> DeferredCopies | None:
        """Copies a state, each tensor to a MiB of its own."""
        copies._backend = fake_backend(self.stream)
        self.arena = self.pool.acquire([len(state) << 20])
        self.shapes = {key: value.shape for key, value in state.items()}
        for number, (key, value) in enumerate(state.items()):
            copy = TensorCopy(key, value.detach(), self.arena.files[0], number << 20)
            copies.add(copy, value)
        copies.run()
        copies.wait()
        return copies.start_deferred()

    def saved(self) -> dict[str, torch.Tensor]:
        memory = self.arena.files[0].memory
        return {
            key: torch.frombuffer(
                memory,
                dtype=torch.int64 if key.endswith("num_batches_tracked") else torch.float32,
                count=shape.numel(),
                offset=number << 20,
            )
            .view(shape)
            .clone()
            for number, (key, shape) in enumerate(self.shapes.items())
        }


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.pool.close()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_a_guarded_step_waits_and_the_forward_pass_does_not(loop: Loop) -> None:
    guards = Guards()
    guards.add(loop.optimizer, wait=True)
    before = {key: value.clone() for key, value in loop.state().items()}
    deferred = loop.begin(guards.copies("overlapped"), loop.state())
    assert deferred is not None
    guards.add_copies(deferred)
    done = loop.stream.done
    # It changes the buffers.
    loop.backward()
    assert loop.stream.done == done
    assert not torch.equal(loop.state()["1.running_mean"], before["1.running_mean"])
    loop.optimizer.step()
    assert loop.stream.stream_waits == 1
    deferred.finish()
    assert_equal(loop.saved(), before)
    # The next step has nothing to wait for.
    loop.step()
    assert loop.stream.stream_waits == 1


def test_only_what_the_optimizer_changes_is_late(loop: Loop) -> None:
    guards = Guards()
    guards.add(loop.optimizer, wait=True)
    late = guards._may_defer()
    state = loop.state() | {"mean of weights": loop.model[0].weight.detach().clone()}
    assert {key for key, value in state.items() if late(value)} == {
        *("0.weight", "0.bias", "1.weight", "1.bias"),
        *(key for key in state if key.startswith("optimizer.")),
    }


def test_a_state_that_is_loaded_again_is_the_optimizers_too(loop: Loop) -> None:
    guards = Guards()
    guards.add(loop.optimizer, wait=True)
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())
    late = guards._may_defer()
    assert all(late(v) for k, v in loop.state().items() if k.endswith("exp_avg"))


def test_without_a_guard_parameters_are_late_and_the_loop_waits(loop: Loop) -> None:
    late = Guards()._may_defer()
    assert [key for key, value in loop.state().items() if late(value)] == []
    parameters = dict(loop.model.named_parameters())
    assert all(map(late, parameters.values()))
    before = {key: value.detach().clone() for key, value in parameters.items()}
    deferred = loop.begin(Guards().copies("overlapped"), parameters)  # type: ignore[arg-type]
    assert deferred is not None
    deferred.finish()
    loop.step()
    assert_equal(loop.saved(), before)


def test_a_step_that_waited_for_nothing_fails_the_save_by_name(loop: Loop) -> None:
    parameters = dict(loop.model.named_parameters())
    deferred = loop.begin(Guards().copies("overlapped"), parameters)  # type: ignore[arg-type]
    assert deferred is not None
    loop.step()
    with pytest.raises(InvalidRequestError, match=r"'0\.weight' was changed before it was copied"):
        deferred.finish()


def test_blocking_leaves_nothing_for_later(loop: Loop) -> None:
    guards = Guards()
    guards.add(loop.optimizer, wait=True)
    assert loop.begin(guards.copies("blocking"), loop.state()) is None
    assert_equal(loop.saved(), loop.state())


def test_a_guard_that_is_removed_guards_no_more(loop: Loop) -> None:
    guards = Guards()
    with guards.add(loop.optimizer, wait=True):
        deferred = loop.begin(guards.copies("overlapped"), loop.state())
    assert deferred is not None
    guards.add_copies(deferred)
    loop.optimizer.step()
    assert loop.stream.stream_waits == 0
    deferred.finish()
    assert not any(map(guards._may_defer(), loop.state().values()))


def test_what_is_being_copied_when_a_guard_is_removed_is_waited_for(loop: Loop) -> None:
    guards = Guards()
    guard = guards.add(loop.optimizer, wait=True)
    before = {key: value.clone() for key, value in loop.state().items()}
    deferred = loop.begin(guards.copies("overlapped"), loop.state())
    assert deferred is not None
    guards.add_copies(deferred)
    with guard:
        assert loop.stream.stream_waits == 0
    assert loop.stream.stream_waits == 1
    loop.optimizer.step()
    deferred.finish()
    assert_equal(loop.saved(), before)


def test_a_guard_that_does_not_wait_only_names_the_owner(loop: Loop) -> None:
    guards = Guards()
    guards.add(loop.optimizer, wait=False)
    before = {key: value.clone() for key, value in loop.state().items()}
    deferred = loop.begin(guards.copies("overlapped"), loop.state())
    assert deferred is not None
    guards.add_copies(deferred)
    deferred.finish()
    loop.step()
    assert loop.stream.stream_waits == 0
    assert_equal(loop.saved(), before)


def test_an_optimizer_is_not_kept_alive(loop: Loop) -> None:
    guards = Guards()
    guard = guards.add(loop.optimizer, wait=True)
    gone = weakref.ref(loop.optimizer)
    del loop.optimizer
    gc.collect()
    assert gone() is None
    assert guard.optimizer is None
    guards.copies("overlapped")
    guard.remove()


def test_an_optimizer_in_backward_is_refused_with_the_reason(loop: Loop) -> None:
    _apply_optimizer_in_backward(torch.optim.SGD, loop.model.parameters(), {"lr": 0.1})
    with pytest.raises(InvalidRequestError, match=r"AdamW steps inside backward\(\)"):
        Guards().add(loop.optimizer, wait=True)
    late = Guards()._may_defer()
    text = r"optimizer of a parameter of shape \(300, 300\) steps inside backward\(\).*'blocking'"
    with pytest.raises(InvalidRequestError, match=text):
        late(next(loop.model.parameters()))


def test_one_that_is_seen_to_step_in_backward_still_waits_and_is_refused_later(loop: Loop) -> None:
    def steps(_: Any) -> None:
        loop.optimizer.step()

    guards = Guards()
    guards.add(loop.optimizer, wait=True)
    before = {key: value.clone() for key, value in loop.state().items()}
    deferred = loop.begin(guards.copies("overlapped"), loop.state())
    assert deferred is not None
    guards.add_copies(deferred)
    loop.model[0].weight.register_post_accumulate_grad_hook(steps)
    loop.backward()
    deferred.finish()
    assert_equal(loop.saved(), before)
    with pytest.raises(InvalidRequestError, match=r"AdamW steps inside backward\(\)"):
        guards.copies("overlapped")
    guards.copies("blocking")


def test_a_step_in_a_graph_is_refused(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    guards = Guards()
    guards.add(loop.optimizer, wait=True)
    monkeypatch.setattr("pannier.client.staging.device_stream.is_capturing", lambda: True)
    loop.step()
    with pytest.raises(InvalidRequestError, match="AdamW is captured in a CUDA graph"):
        guards.copies("overlapped")


@pytest.mark.parametrize("thing", [None, torch.nn.Linear(2, 2), object()])
def test_only_optimizers_can_be_guarded(thing: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"no torch\.optim\.Optimizer"):
        Guards().add(thing, wait=True)
