"""Stores of checkpoints. :func:`open_store` makes the one for a URL.

Every store makes conditional writes: an object is created if absent, or replaces exactly the generation that
was read.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from pannier.common.locations import parse
from pannier.storage.base import (
    ConflictError,
    DeniedError,
    HeldError,
    IntegrityError,
    NotFoundError,
    ObjectInfo,
    Source,
    StorageError,
    Store,
    Unfinished,
)
from pannier.storage.local.store import LocalStore
from pannier.storage.memory import MemoryStore
from pannier.storage.upload_threads import UploadThreads, default_threads
from pannier.storage.url import check_allowed, check_allowed_in_time, check_no_link, check_shared
from pannier.wire.errors import ConfigurationError


def open_store(
    url: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    upload_threads: UploadThreads = default_threads,
    deadline_s: float = 300,
    allow: Sequence[str] = (),
) -> Store:
    """The store of one directory; connects at first use, in the event loop that uses it.

    Args:
        url: an absolute path, ``file://``, ``gs://`` (``gcs://``), ``s3://`` or
            ``memory://`` (within this process).
        storage_options: arguments of gcsfs' or s3fs' file system (credentials,
            ``endpoint_url``); the others take none.
        upload_threads: the threads that read and send data files.
        deadline_s: seconds after which an operation, or an upload without progress, fails.
        allow: roots that a local directory must lie below, or be, wherever symbolic links lead; empty:
            anywhere.

    Raises:
        InvalidRequestError: a malformed URL, or an unknown scheme.
        ConfigurationError: the package for the scheme isn't installed.
    """
    location = parse(url)
    options = dict(storage_options or {})
    if location.scheme == "file":
        return LocalStore(location, upload_threads, deadline_s=deadline_s, allow=allow)
    if location.scheme == "memory":
        return MemoryStore(location, upload_threads)
    if location.scheme == "gs":
        try:
            from pannier.storage.gcs.store import GcsStore
        except ModuleNotFoundError as error:
            raise _missing(url, "gcsfs", error) from error
        return GcsStore(location, options, upload_threads, deadline_s=deadline_s)
    try:
        from pannier.storage.s3.store import S3Store
    except ModuleNotFoundError as error:
        raise _missing(url, "s3fs", error) from error
    return S3Store(location, options, upload_threads, deadline_s=deadline_s)


def import_store(url: str) -> None:
    """Imports what :func:`open_store` needs for a URL, which takes a second or two once; blocking.

    Call it in a thread before :func:`open_store` where others wait for the event loop. Raises nothing:
    :func:`open_store` raises the error.
    """
    module = _module(url)
    if module:
        with suppress(ModuleNotFoundError):
            import_module(module)


def is_imported(url: str) -> bool:
    """Whether :func:`import_store` has nothing to do."""
    module = _module(url)
    found = sys.modules.get(module)
    # A module is in sys.modules already while a thread still imports it.
    return not module or (found is not None and not getattr(found.__spec__, "_initializing", False))


def _module(url: str) -> str:
    """Name of the store's module, if it is imported at its first use; else empty."""
    scheme = url.partition("://")[0]
    package = {"gs": "gcs", "gcs": "gcs", "s3": "s3"}.get(scheme)
    return f"pannier.storage.{package}.store" if package else ""


def _missing(url: str, package: str, error: ModuleNotFoundError) -> ConfigurationError:
    return ConfigurationError(
        f"{url} needs {package}, which can't be imported in {sys.prefix} ({error}): pip install {package} "
        "there, where the daemons run, and where the trainers run"
    )


__all__ = [
    "ConflictError",
    "DeniedError",
    "HeldError",
    "IntegrityError",
    "NotFoundError",
    "ObjectInfo",
    "Source",
    "StorageError",
    "Store",
    "Unfinished",
    "check_allowed",
    "check_allowed_in_time",
    "check_no_link",
    "check_shared",
    "import_store",
    "is_imported",
    "open_store",
]
