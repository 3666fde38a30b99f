"""Takes room on disk or tmpfs for a file of the spool, before bytes are written there.

In: a descriptor and a range. Out: zeros there, for which there is room. Blocking.
"""

import errno
import os
import resource
from pathlib import Path
from typing import Final

from pannier.wire.errors import ConfigurationError

PAGE: Final = 4096
_NO_FALLOCATE: Final = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
_PIECE: Final = 8 << 20
"""Bytes written at a time."""


def whole_pages(size: int) -> int:
    """Bytes that a file of ``size`` bytes takes, at least one page."""
    return max(1, -(-size // PAGE)) * PAGE


def reserve(fd: int, path: Path, start: int, size: int) -> None:
    """Takes room for these bytes, which are zero afterwards.

    Raises:
        OSError: there isn't enough.
        ConfigurationError: the process's limit of file sizes forbids it.
    """
    try:
        os.posix_fallocate(fd, start, size)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise _too_large(path, start + size) from error
        if error.errno not in _NO_FALLOCATE:
            raise
        for offset in range(start, start + size, _PIECE):
            _write_zeros(fd, offset, min(_PIECE, start + size - offset))


def _write_zeros(fd: int, offset: int, size: int) -> None:
    while size:
        written = os.pwrite(fd, bytes(size), offset)
        offset, size = offset + written, size - written


def _too_large(path: Path, size: int) -> ConfigurationError:
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    given = "no limit" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
    return ConfigurationError(
        f"the spool file {path} can't have {size} bytes (EFBIG): the sidecar's limit of "
        f"file sizes (RLIMIT_FSIZE, `ulimit -f`, systemd's LimitFSIZE=) is {given}; raise it, then start the "
        "sidecar again (embedded daemons have the limit of the trainer that started them: `pannier down`)"
    )
