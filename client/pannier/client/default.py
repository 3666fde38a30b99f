"""The process's default :class:`Client`, and the functions of ``pannier.client``, which use it.

In: the environment and what ``configure`` overrides. Out: the client, made at its first use. Reading makes none: it
needs the settings alone. Thread-safe.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from pannier.client.client import Client
from pannier.client.config import Settings, load_settings
from pannier.client.reading import Reader
from pannier.client.user_errors import at_call
from pannier.wire.errors import ConfigurationError

_P = ParamSpec("_P")
_S = TypeVar("_S")
_T = TypeVar("_T")

_default: Client | None = None
_lock = threading.Lock()
_overrides: dict[str, Any] = {}


def default_client() -> Client:
    """The client that the module's functions use; made when it is first needed."""
    global _default
    with _lock:
        if _default is None:
            _default = Client(load_settings(**_overrides))
        return _default


def configure(**settings: Any) -> None:
    """Overrides settings of the environment for the default client; to be called before its first use.

    Args:
        settings: fields of :class:`pannier.client.config.Settings`.

    Raises:
        ConfigurationError: a value is not valid, or the client is in use.
    """
    with _lock:
        if _default is not None:
            raise ConfigurationError(
                "configure() comes before the first use of the client; close() it first"
            )
        load_settings(**{**_overrides, **settings})
        _overrides.update(settings)


@at_call
def close(timeout: float | None = None) -> None:
    """Closes the default client; once it is closed, the next use makes a new one.

    See :meth:`Client.close`.
    """
    global _default
    client = _default
    if client is None:
        return
    try:
        client.close(timeout)
    finally:
        with _lock:
            if client.is_closed and _default is client:
                _default = None


def raise_unretrieved() -> None:
    """Raises the default client's unretrieved errors; makes no client."""
    client = _default
    if client is not None and client.is_own_process:
        client.raise_unretrieved()


def wait_default() -> None:
    """Waits until the default client's saves have ended; raises its unretrieved errors. Makes no client."""
    client = _default
    if client is not None and client.is_own_process:
        client.saves.wait(None)
        client.raise_unretrieved()


def _settings() -> Settings:
    """The default client's settings, or those it would have.

    Raises ConfigurationError: a variable is not valid.
    """
    client = _default
    return load_settings(**_overrides) if client is None else client.settings


def _start_daemons(no_dist: bool) -> None:
    default_client().memberships.of(no_dist).sidecar()


def _function(
    method: Callable[Concatenate[_S, _P], _T], owner: Callable[[], _S]
) -> Callable[_P, _T]:
    """The method of ``owner()``, as a function of this module with the method's signature and documentation."""

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return method(owner(), *args, **kwargs)

    signature = inspect.signature(method)
    _, *own = signature.parameters.values()
    call.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    # Pickles name it by these.
    call.__module__, call.__qualname__ = __name__, call.__name__
    return call


async_save: Final = _function(Client.async_save, default_client)
save: Final = _function(Client.save, default_client)
prepare: Final = _function(Client.prepare, default_client)
guard: Final = _function(Client.guard, default_client)
wait_all: Final = _function(Client.wait_all, default_client)
advice: Final = _function(Client.advice, default_client)

_reader: Final = Reader(_settings, raise_unretrieved, _start_daemons)


def _default_reader() -> Reader:
    return _reader


load: Final = _function(Reader.load, _default_reader)
latest: Final = _function(Reader.latest, _default_reader)
list: Final = _function(Reader.list, _default_reader)
read_extra_file: Final = _function(Reader.read_extra_file, _default_reader)
