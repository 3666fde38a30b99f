"""Replaces torch's DCP functions by Pannier's, for trainers whose code can't be changed.

In: calls of ``save``, ``async_save`` and ``load`` with torch's arguments. Out: saves and loads of the
process's default client; storage other than plain files of DCP is left to torch's own functions. An adapter
can handle the states of one local directory itself (:class:`StateTaker`). Thread-safe; functions are replaced
for all threads of the process.
"""

import functools
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import FunctionType, ModuleType, TracebackType
from typing import Any, Final, Protocol, TypeVar

from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata

from pannier import client
from pannier.client import torch_compat
from pannier.client.default import wait_default
from pannier.client.handle import SaveHandle
from pannier.client.loading.catalog import PerRankError
from pannier.client.loading.metadata_reader import ExtensionsError
from pannier.common.locations import absolute
from pannier.wire.errors import InvalidRequestError
from pannier.wire.failures import shorten

_log = logging.getLogger(__name__)

_R = TypeVar("_R")

_torch_save, _torch_async_save = state_dict_saver.save, state_dict_saver.async_save
_torch_load = state_dict_loader.load

_SHOWN: Final = 8
_lock: Final = threading.Lock()
_depth = 0
"""Number of patches in force; the first replaces torch's functions, and the end of the last restores them."""
_takers: "Final[dict[Path, StateTaker]]" = {}
"""By the directory whose states each handles."""
_replaced: Final[list[tuple[ModuleType, str, Any]]] = []
"""Modules and names that had one of torch's functions, and the function."""
_pending: Final[set[SaveHandle]] = set()
"""Saves of the patched ``async_save`` and of adapters that have not ended."""
_passed_on: Final[set[str]] = set()
"""Kinds of storage for which it was logged that they are left to torch."""


class StateTaker(Protocol):
    """An adapter that saves and loads, instead of torch, the states below one directory.

    Called in the thread that calls torch, with the path below the directory.
    """

    def save(self, path: Path, state_dict: dict[str, Any]) -> bool:
        """Takes a state. False: it is left to torch."""
        ...

    def load(self, path: Path, state_dict: dict[str, Any]) -> bool:
        """Loads a state in place. False: it is left to torch."""
        ...


def take_states(directory: Path, taker: StateTaker) -> None:
    """Lets ``taker`` save and load the states of ``directory``, an absolute path; replaces an earlier taker.

    Replaces torch's functions as :func:`patch_dcp` does; calls for other directories behave as before.
    """
    with _lock:
        _takers[directory] = taker
        _replace()


def leave_states(directory: Path) -> None:
    """Leaves a directory to torch again; its functions stay replaced, which makes taking the next one quick."""
    with _lock:
        del _takers[directory]


def track(handle: SaveHandle) -> None:
    """Lets :func:`wait_for_saves` wait for a save until it has ended."""
    with _lock:
        _pending.add(handle)
    handle.add_done_callback(_forget)


def wait_for_saves(checkpoint_id: str | os.PathLike[str]) -> None:
    """Waits for this process's tracked saves to a checkpoint; a load that follows raises what they raise."""
    for handle in _underway(absolute(checkpoint_id)):
        handle.wait()


class DcpPatch(AbstractContextManager["DcpPatch"]):
    """See :func:`patch_dcp`. May be nested, and used again."""

    def __enter__(self) -> "DcpPatch":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.stop()
        else:
            _restore()

    def start(self) -> None:
        """Replaces torch's functions, until :meth:`stop`."""
        global _depth
        with _lock:
            _depth += 1
            _replace()
        if unreached := sorted(_find_unreached()):
            _log.warning(
                "patch_dcp(): %s hold torch's own function, and go on calling it: start the patch before they "
                "are made, or give them torch.distributed.checkpoint's function of now",
                shorten(unreached, _SHOWN),
            )

    def stop(self) -> None:
        """Puts torch's functions back, and waits for the saves that are under way.

        Raises PannierError: one failed and its error was not retrieved.
        """
        _restore()
        # Not only those that are tracked: a call that raised an earlier save's error gave no handle.
        wait_default()


def patch_dcp() -> DcpPatch:
    """Makes ``torch.distributed.checkpoint``'s ``save``, ``async_save`` and ``load`` use Pannier.

    For trainers whose code can't be changed: ``with client.patch_dcp(): trainer.train()``, or
    ``client.patch_dcp().start()`` for good. It replaces the three functions in every module that has them
    by then, for all threads, until the context is left or ``stop()`` is called. Both wait for the saves under
    way and raise their errors, except a context that is left by an exception. May be nested. What holds a function
    in another way by then (``functools.partial``, ``staticmethod``, a default argument) goes on with torch's, which
    a warning says; so do torch's converters (``format_utils``), which call inner functions.

    The functions take torch's arguments. ``save`` returns when the checkpoint is committed. ``async_save``
    returns when it is staged, with a :class:`~pannier.client.SaveHandle`: a ``Future`` of the commit, and an
    ``AsyncSaveResponse``. ``load`` waits for a save of this process to the same checkpoint. Of torch's
    ``FileSystemWriter`` and ``FsspecWriter`` (and readers) the path and ``overwrite`` are used; their threads
    and storage options are ignored. As with torch, a save replaces an existing checkpoint, also another
    job's. ``async_checkpointer_type`` and torch's own stagers are ignored, since Pannier stages by itself.
    Other storage, such as safetensors, and subclasses are left to torch, with one warning for each kind.
    A checkpoint that torch saved with ``use_collectives=False``, or with extensions (``ZStandard``), is loaded by
    torch, too. ``save_id`` of a given writer is that of its last committed save.

    Raises, from the functions:
        InvalidRequestError: another ``async_stager``, or ``use_collectives=False``, which Pannier can't honour.
        PannierError: what ``client.save``, ``client.async_save`` and ``client.load`` raise.
    """
    return DcpPatch()


def _replace() -> None:
    if _replaced:
        return
    ours = dict(zip((_torch_save, _torch_async_save, _torch_load), _OURS, strict=True))
    # A function that was imported by name is an attribute of the importing module, too.
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__ == __name__:
            continue
        for name, value in list(vars(module).items()):
            # By type, since isinstance() may run code of lazily loaded objects.
            if type(value) is FunctionType and value in ours:
                setattr(module, name, ours[value])
                _replaced.append((module, name, value))


def _restore() -> None:
    global _depth
    with _lock:
        if not _depth:
            raise RuntimeError("patch_dcp() was stopped more often than it was started")
        _depth -= 1
        if _depth or _takers:
            return
        while _replaced:
            module, name, original = _replaced.pop()
            # Unless another patch has come on top of it.
            if any(vars(module).get(name) is each for each in _OURS):
                setattr(module, name, original)


def _underway(checkpoint_id: str) -> list[SaveHandle]:
    """Saves to ``checkpoint_id`` that have not ended."""
    with _lock:
        return [handle for handle in _pending if handle.status().checkpoint_id == checkpoint_id]


def _takes_second(name: str) -> Callable[[Callable[..., _R]], Callable[..., _R]]:
    """Lets a function take its keyword argument ``name`` as the second positional one, as torch's do.

    See ``_api_bc_check`` in https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/checkpoint/utils.py
    """

    def decorate(function: Callable[..., _R]) -> Callable[..., _R]:
        def call(state_dict: Any, *storage: Any, **arguments: Any) -> _R:
            if len(storage) > 1 or (storage and name in arguments):
                raise TypeError(f"give a state dict and {name}, the rest by keywords")
            if storage:
                arguments[name] = storage[0]
            return function(state_dict, **arguments)

        return call

    return decorate


@functools.wraps(_torch_save)
@_takes_second("storage_writer")
def _save(
    state_dict: Any, *, checkpoint_id: Any = None, storage_writer: Any = None, **arguments: Any
) -> Metadata:
    if taken := _taker(checkpoint_id, storage_writer):
        taker, path = taken
        if taker.save(path, state_dict):
            return Metadata({})
    target = _target(checkpoint_id, storage_writer)
    if target is None:
        metadata: Metadata = _torch_save(
            state_dict, checkpoint_id=checkpoint_id, storage_writer=storage_writer, **arguments
        )
        return metadata
    # Committed when it returns: callers read, rename or link it next.
    result = client.save(state_dict, **target, **arguments)
    _set_save_id(storage_writer, result)
    return result.metadata()


@functools.wraps(_torch_async_save)
@_takes_second("storage_writer")
def _async_save(
    state_dict: Any,
    *,
    checkpoint_id: Any = None,
    storage_writer: Any = None,
    async_checkpointer_type: Any = None,
    async_stager: Any = None,
    **arguments: Any,
) -> Any:
    target = _target(checkpoint_id, storage_writer)
    if target is None:
        own = {"async_checkpointer_type": async_checkpointer_type, "async_stager": async_stager}
        return _torch_async_save(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=storage_writer,
            **{name: value for name, value in own.items() if value is not None},
            **arguments,
        )
    _check_stager(async_stager)
    handle = client.async_save(state_dict, **target, **arguments)
    track(handle)
    handle.add_commit_callback(functools.partial(_set_save_id, storage_writer))
    return handle


@functools.wraps(_torch_load)
@_takes_second("storage_reader")
def _load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Any = None,
    storage_reader: Any = None,
    **arguments: Any,
) -> None:
    if taken := _taker(checkpoint_id, storage_reader):
        taker, path = taken
        if taker.load(path, state_dict):
            return
    source = _source(checkpoint_id, storage_reader)
    if source is not None:
        wait_for_saves(source.get("checkpoint_id") or source["storage_reader"].checkpoint_id)
        # Raised on all ranks: so all of them go on with torch.
        with suppress(PerRankError, ExtensionsError):
            client.load(state_dict, **source, **arguments)
            return
    _torch_load(state_dict, checkpoint_id=checkpoint_id, storage_reader=storage_reader, **arguments)


_OURS: Final = (_save, _async_save, _load)


def _find_unreached() -> Iterator[str]:
    """What holds torch's functions outside of modules, and can be named."""
    holders = [
        holder
        for holder in gc.get_referrers(_torch_save, _torch_async_save, _torch_load)
        if isinstance(holder, functools.partial | staticmethod | tuple | dict)
    ]
    for holder in holders:
        if isinstance(holder, functools.partial):
            yield f"a functools.partial of {getattr(holder.func, '__name__', 'a function')}"
    for user in gc.get_referrers(*holders):
        # By type, as above.
        if type(user) is FunctionType:
            defaults = user.__defaults__, user.__kwdefaults__
            if any(each is holder for each in defaults for holder in holders):
                yield f"a default argument of {user.__module__}.{user.__qualname__}"
        elif type(user) is dict and "__module__" in user:
            for name, value in user.items():
                if isinstance(value, staticmethod) and any(value is each for each in holders):
                    yield f"the staticmethod {name} of a class in {user['__module__']}"


def _set_save_id(writer: Any, result: client.SaveResult) -> None:
    """As torch's own writers have it: the one in the ``.metadata`` that was written."""
    if writer is not None and not isinstance(writer, client.StorageWriter):
        writer.save_id = result.attempt


def _forget(handle: Any) -> None:
    with _lock:
        _pending.discard(handle)


def _taker(checkpoint_id: Any, storage: Any) -> tuple[StateTaker, Path] | None:
    """The taker for a location, and the location's path below the taker's directory; None: there is none."""
    place = checkpoint_id or getattr(storage, "path", None)
    if not isinstance(place, str | os.PathLike):
        return None
    path = Path(place).absolute()
    with _lock:
        for directory, taker in _takers.items():
            if directory in path.parents:
                return taker, path.relative_to(directory)
    return None


def _target(checkpoint_id: Any, writer: Any) -> dict[str, Any] | None:
    """Where a save goes, as arguments of the client; None: it is left to torch."""
    if not _depth:
        # No patch is in force: only takers are, or the caller has kept a reference to a replacement.
        return None
    if isinstance(writer, client.StorageWriter):
        return {"checkpoint_id": checkpoint_id, "storage_writer": writer}
    path = _path(checkpoint_id, writer)
    # torch's own replaces whatever is there, unless its writer may not.
    return path and {**path, "overwrite": getattr(writer, "overwrite", True)}


def _source(checkpoint_id: Any, reader: Any) -> dict[str, Any] | None:
    """What a load reads, as arguments of the client; None: it is left to torch."""
    if not _depth:
        return None
    if isinstance(reader, client.StorageReader):
        found = {"checkpoint_id": checkpoint_id, "storage_reader": reader}
        return {name: value for name, value in found.items() if value is not None}
    return _path(checkpoint_id, reader)


def _path(checkpoint_id: Any, storage: Any) -> dict[str, Any] | None:
    if storage is None:
        # Without either, torch's own error names what is missing.
        return None if checkpoint_id is None else {"checkpoint_id": checkpoint_id}
    if torch_compat.is_plain_files(storage):
        return {"checkpoint_id": checkpoint_id or storage.path}
    kind = f"{type(storage).__module__}.{type(storage).__qualname__}"
    if kind not in _passed_on:
        _passed_on.add(kind)
        _log.warning("patch_dcp(): what %s reads or writes is left to torch", kind)
    return None


def _check_stager(stager: Any) -> None:
    """Raises InvalidRequestError for a stager other than torch's: Pannier would not call it.

    torch's own stagers only copy, as Pannier does.
    """
    kind = type(stager)
    if stager is None or kind.__module__.startswith(f"{checkpoint.__name__}."):
        return
    raise InvalidRequestError(
        f"async_stager={kind.__module__}.{kind.__qualname__}: Pannier stages by itself and would not call it; "
        "leave it out, or leave this call out of patch_dcp()"
    )
