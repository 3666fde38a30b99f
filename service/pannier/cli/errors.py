"""From an exception to a message with a hint on standard error, and an exit status."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from pannier.wire.errors import StorageError

OK = 0
NEGATIVE = 1
"""A negative result: aborted, damaged, not found."""
USAGE = 2
UNREACHABLE = 3

EXIT_STATUSES = (
    "Exit status: 0 success; 1 negative result (aborted, damaged, not found); 2 wrong usage or "
    "configuration; 3 a daemon or the storage can't be reached; 130 interrupted."
)


@contextmanager
def report_errors() -> Iterator[None]:
    """Turns errors that users can act on into a message and an exit status; bugs keep their traceback."""
    # wire.errors is imported on failure only: it imports gRPC.
    try:
        yield
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f"`{context.command_path} --help` lists what there is" if context else ""
        complain(error.format_message(), hint)
        sys.exit(error.exit_code)
    except Exception as error:
        status, hint = _classify(error)
        if status is None:
            raise
        complain(str(error), hint)
        sys.exit(status)


def complain(message: str, hint: str = "") -> None:
    """What is wrong, and what to do, on standard error."""
    from pannier.cli import output

    output.say(f"error: {message}", err=True)
    if hint:
        output.say(f"hint: {hint}", err=True)


def end_negative(message: str, hint: str) -> NoReturn:
    """Ends the command with a negative result."""
    complain(message, hint)
    raise click.exceptions.Exit(NEGATIVE)


class Failures:
    """Storage errors of single checkpoints: a command continues with the others, and exits with status 3."""

    def __init__(self) -> None:
        self._texts: dict[str, None] = {}

    def add(self, error: "StorageError") -> None:
        """Adds an error; raises it when storage doesn't answer at all: each checkpoint would wait for it."""
        from pannier.storage.base import UnreachableError

        if isinstance(error, UnreachableError):
            raise error
        self._texts[str(error)] = None

    def report(self) -> None:
        """Writes the errors to standard error."""
        for count, text in enumerate(self._texts, 1):
            last = count == len(self._texts)
            complain(text, "run the command again when this is solved" if last else "")

    def __bool__(self) -> bool:
        return bool(self._texts)


def _classify(error: Exception) -> tuple[int | None, str]:
    from pannier.wire import errors

    if isinstance(error, (errors.ConfigurationError, errors.InvalidRequestError)):
        return USAGE, ""
    if isinstance(error, (errors.UnavailableError, errors.DeadlineError)):
        usual = (
            "is the daemon running, and is this its address? Give it with --address or "
            "PANNIER_SIDECAR"
        )
        return UNREACHABLE, getattr(error, "hint", usual)
    if isinstance(error, errors.VersionMismatchError):
        return UNREACHABLE, "install the same version of pannier on both sides"
    if isinstance(error, errors.StorageError):
        return UNREACHABLE, _storage_hint(error)
    if isinstance(error, errors.PannierError):
        return NEGATIVE, ""
    return None, ""


def _storage_hint(error: "StorageError") -> str:
    from pannier.storage.base import DeniedError, NotFoundError, UnreachableError
    from pannier.storage.retry import TransientError

    if isinstance(error, UnreachableError):
        return (
            "check the endpoint (storage option endpoint_url, AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or "
            "STORAGE_EMULATOR_HOST) and the network"
        )
    if isinstance(error, DeniedError):
        return "check the credentials and their permissions"
    if isinstance(error.__cause__, TransientError):
        return "storage has only temporary errors: try again later, or wait longer (--timeout)"
    return "check the URL" if isinstance(error, NotFoundError) else ""
