"""The process in which ``pannier export`` exports: the command line imports neither torch nor the client.

In: one line on standard input, a JSON object with the arguments of :func:`pannier.client.export`. Out: lines on
standard output, JSON objects too: ``progress``, and at last ``result`` or ``error``. At SIGTERM or SIGINT it
removes what is half-written, and ends.
"""

import dataclasses
import json
import os
import signal
import sys
import warnings
from typing import Any, Final, NoReturn

from pannier.client.conversion.export import export
from pannier.client.conversion.output_directory import remove_unfinished
from pannier.client.loading.filesystem import MissingError
from pannier.wire import errors
from pannier.wire.errors import PannierError

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def main() -> int:
    """Runs one export; returns the exit status, 1 for an error that was reported."""
    for number in _SIGNALS:
        signal.signal(number, _end)
    # torch before 2.10 warns of what its own writer calls.
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")
    arguments = json.loads(sys.stdin.readline())
    try:
        result = export(**arguments, progress=lambda done, total: _print(progress=[done, total]))
    except MissingError as error:
        # No fault of the storage.
        _print(error=str(error), type=PannierError.__name__)
        return 1
    except PannierError as error:
        _print(error=str(error), type=_public_type(error))
        return 1
    _print(result=dataclasses.asdict(result))
    return 0


def _print(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def _public_type(error: PannierError) -> str:
    """The name of the error's class, or of the nearest one that the command line knows."""
    known = vars(errors).values()
    return next(cls.__name__ for cls in type(error).__mro__ if cls in known)


def _end(number: int, _: object) -> NoReturn:
    """Doesn't wait for threads that read: storage may hang."""
    remove_unfinished()
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
