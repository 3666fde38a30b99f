"""Extra files of a checkpoint, read from the attempt that wrote its ``.metadata``.

In: a checkpoint id and a name. Out: the file's bytes, compared with their checksum. They are stored in a data
file of the attempt: so they match the state that is loaded, also while a save to the same id is being
committed. The copy at ``<checkpoint_id>/<name>`` is for tools that know nothing of Pannier. Blocking; any
thread.
"""

import itertools
import os
from collections.abc import Mapping
from typing import Any, Final

from pannier.client.loading import absence, catalog, checksum_verifier
from pannier.client.loading.filesystem import MissingError, open_dir

_TRIES: Final = 3
"""Tries, if the checkpoint is replaced while it is read."""


def read(
    checkpoint_id: str | os.PathLike[str], name: str, storage_options: Mapping[str, Any] | None
) -> bytes:
    """See :meth:`pannier.client.reading.Reader.read_extra_file`."""
    directory = open_dir(checkpoint_id, storage_options)

    tries = itertools.count(1)
    while True:
        try:
            commit = catalog.find_commit(directory)
        except MissingError:
            raise absence.absence_error(directory) from None
        try:
            if commit is None:
                # Another writer's: there are no records, only the file itself.
                return directory.read(name)
            return checksum_verifier.read_extra_file(directory, commit, name)
        except MissingError:
            if next(tries) == _TRIES:
                raise
