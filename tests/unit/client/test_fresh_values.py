"""Each save has its own step's values, whatever was changed, replaced or moved since the one before.

Plans, archive heads and memory are reused from save to save; values never are.
"""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from pannier.client.staging.optimizer_guard import Guards
from pannier.wire.errors import InvalidRequestError
from support.actors.staged_saves import StagedSaves, assert_same, values_of
from support.processes.absent_ranks import alone_of
from support.states import changing_shards
from support.states.changing import CHANGES, WRITING_IN_PLACE, Training
from support.states.host_streams import FakeStream, fake_backend, host_as_device

changes = st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=8)


class Subclass(DefaultSavePlanner):
    """Run at each save: it might change something."""


PLANNERS = {"none": lambda: None, "default": DefaultSavePlanner, "subclass": Subclass}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads of torch would wait for each other longer than they work."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@settings(max_examples=40)
@given(changes, st.integers(0, 1 << 30), st.sampled_from(sorted(PLANNERS)))
def test_each_save_has_its_steps_bytes(names: list[str], seed: int, planner: str) -> None:
    """Also when the next change comes as soon as it is staged."""
    training = Training(seed)
    saves = StagedSaves()
    kept = PLANNERS[planner]()
    try:
        for name in ["step", *names, "step"]:
            state = training.state()
            save = saves.stage(state, kept)
            wanted = values_of(state, save.fresh.items)
            CHANGES[name](training)
            assert_same(save.contents(), wanted)
            saves.release(save)
    finally:
        saves.close()


@settings(max_examples=30)
@given(changes, st.integers(0, 1 << 30))
def test_copies_that_are_late_have_it_too_or_the_save_fails(names: list[str], seed: int) -> None:
    """Of a device that copies only when it must: what is overwritten before is noticed."""
    guards = Guards()
    training = Training(seed, on_optimizer=lambda optimizer: guards.add(optimizer, wait=True))
    saves = StagedSaves()
    backend = fake_backend(FakeStream())
    try:
        with pytest.MonkeyPatch.context() as patch, host_as_device(patch, backend):
            for name in ["step", *names, "step"]:
                state = training.state()
                save = saves.stage(state, devices=guards.copies("overlapped"))
                wanted = values_of(state, save.fresh.items)
                assert save.staged.deferred is not None
                guards.add_copies(save.staged.deferred)
                CHANGES[name](training)
                try:
                    save.staged.deferred.finish()
                except InvalidRequestError:
                    if name not in WRITING_IN_PLACE:
                        raise
                else:
                    assert_same(save.contents(), wanted)
                saves.release(save)
    finally:
        saves.close()


@settings(max_examples=15)
@given(
    st.lists(st.sampled_from(sorted(changing_shards.CHANGES)), min_size=1, max_size=8),
    st.integers(0, 1 << 30),
    st.integers(1, 4),
)
def test_each_save_has_its_steps_shards(names: list[str], seed: int, ranks: int) -> None:
    with alone_of(ranks):
        training = changing_shards.ShardedTraining(seed)
        saves = StagedSaves()
        try:
            for name in ["step", *names, "step"]:
                state = training.state()
                save = saves.stage(state)
                wanted = values_of(state, save.fresh.items)
                changing_shards.CHANGES[name](training)
                assert_same(save.contents(), wanted)
                saves.release(save)
        finally:
            saves.close()


def test_a_compiled_module_is_saved_as_it_is_now() -> None:
    """Its compiled code holds on to nothing that a save could read instead of the module."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    compiled = torch.compile(module, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9)
    saves = StagedSaves()
    planned = []
    for number in range(4):
        compiled(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number == 2:
            # Another object under the same name; the module is compiled again.
            module[0].weight = torch.nn.Parameter(torch.randn(4, 3))
        state = {"model": compiled.state_dict(), "plain": module.state_dict()}
        save = saves.stage(state)
        wanted = values_of(state, save.fresh.items)
        assert_same(save.contents(), wanted)
        assert wanted["model._orig_mod.0.weight", (0, 0)].equal(module[0].weight)
        saves.release(save)
        planned.append(save.was_planned)
    saves.close()
    assert planned == [True, False, False, False]
