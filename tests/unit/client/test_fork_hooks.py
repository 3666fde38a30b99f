"""What a forked child does with what it inherits from the client."""

import os

from pannier.client import fork_hooks
from support.processes.cli import run_python
from support.processes.daemons import clean_environment


class Thing:
    pass


FORKING = """
import gc, os, weakref
from pannier.client import fork_hooks

class Thing:
    pass

things = [Thing()]
gone = weakref.ref(things[0])
fork_hooks.keep(things[0])
fork_hooks.reset_in_child(things.clear)
fork_hooks.reset_in_child(gc.collect)
child = os.fork()
if child == 0:
    os._exit(0 if not things and gone() is not None else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
"""
"""In a process of its own: a child would also collect what other tests have left, gRPC's objects among it."""


def test_a_forked_child_never_frees_what_it_must_not_though_its_last_reference_goes() -> None:
    """It would unmap its own memory, or run gRPC's code."""
    done = run_python(FORKING, env=clean_environment())
    assert done.code == 0, done


def test_a_forked_child_closes_its_other_descriptors_though_one_cannot_be_closed() -> None:
    """A connection that it keeps would hide the parent's death."""
    reading, writing = os.pipe()
    owners = [Thing(), Thing()]
    fork_hooks.close_in_child(owners[0], lambda _: os.close(-1))
    fork_hooks.close_in_child(owners[1], lambda _: os.close(writing))
    child = os.fork()
    if child == 0:
        try:
            os.fstat(writing)
        except OSError:
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    for descriptor in (reading, writing):
        os.close(descriptor)
    assert os.waitstatus_to_exitcode(status) == 0
