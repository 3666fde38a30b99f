"""fsspec's file system of a bucket, with credentials also where their metadata server is late.

In: a class of fsspec, and options. Out: a file system. Without this, a new pod's first call finds no credentials:
gcsfs goes on as an anonymous user, s3fs without any. Blocking; thread-safe.
"""

import os
import time
from collections.abc import Mapping
from typing import Any

import fsspec.asyn

from pannier.common import timeouts
from pannier.common.machine import credentials_may_be_late

_without: set[Any] = set()
"""Classes for which there were none in all that time, as for public buckets: the next call doesn't wait."""


def open_file_system(kind: Any, options: Mapping[str, Any], scheme: str) -> Any:
    """The file system; looks for credentials again for STORAGE_CONTACT_S where they may be late.

    Raises what the class raises.
    """
    if (
        scheme not in ("gs", "gcs", "s3", "s3a")
        or kind in _without
        or _is_given(options)
        or not credentials_may_be_late(os.environ)
    ):
        return kind(**options)
    deadline = time.monotonic() + timeouts.STORAGE_CONTACT_S
    while True:
        last = time.monotonic() >= deadline
        try:
            fs = kind(**options)
            if _has_credentials(fs):
                return fs
            if last:
                _without.add(kind)
                return fs
        except TypeError:  # an option that the class doesn't have
            raise
        except Exception:  # each class has errors of its own for credentials
            if last:
                raise
        # Otherwise fsspec returns the same instance again.
        kind.clear_instance_cache()
        time.sleep(timeouts.CREDENTIALS_AGAIN_S)


def _is_given(options: Mapping[str, Any]) -> bool:
    if options.get("token") in ("google_default", "cloud"):
        return False
    return any(options.get(name) for name in ("token", "key", "secret", "anon"))


def _has_credentials(fs: Any) -> bool:
    if hasattr(fs, "credentials"):  # gcsfs
        return fs.credentials.credentials is not None
    fs.connect()
    return fsspec.asyn.sync(fs.loop, fs.session.get_credentials) is not None
