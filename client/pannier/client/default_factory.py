"""The process's default :class:`SaveFactory`, which ``pannier.client``'s functions use.

In: the environment and what ``configure`` overrides. Out: the factory, made at its first use. Thread-safe.
"""

import threading
from typing import Any

from pannier.client.config import Settings, load_settings
from pannier.client.save_factory import SaveFactory
from pannier.wire.errors import ConfigurationError

_default: SaveFactory | None = None
_default_lock = threading.Lock()
_overrides: dict[str, Any] = {}


def default_factory() -> SaveFactory:
    """The one that ``pannier.client``'s functions use; made when it is first needed."""
    global _default
    with _default_lock:
        if _default is None:
            _default = SaveFactory(load_settings(**_overrides))
        return _default


def default_settings() -> Settings:
    """The default factory's settings, or those it would have; makes no factory.

    Raises ConfigurationError: a variable is not valid.
    """
    factory = _default
    return load_settings(**_overrides) if factory is None else factory.settings


def raise_unretrieved() -> None:
    """Raises the default factory's unretrieved errors; makes no factory."""
    factory = _default
    if factory is not None and factory.is_own_process:
        factory.saves.errors.raise_all()


def wait_default() -> None:
    """Waits until the default factory's saves have ended; raises its unretrieved errors. Makes no factory."""
    factory = _default
    if factory is not None and factory.is_own_process:
        factory.saves.wait(None)
    raise_unretrieved()


def configure(**settings: Any) -> None:
    """Overrides settings of the environment for the default client; to be called before its first use.

    Args:
        settings: fields of :class:`pannier.client.config.Settings`.

    Raises:
        ConfigurationError: a value is not valid, or the client is in use.
    """
    with _default_lock:
        if _default is not None:
            raise ConfigurationError(
                "configure() comes before the first use of the client; close() it first"
            )
        load_settings(**{**_overrides, **settings})
        _overrides.update(settings)


def close_default(timeout: float | None) -> None:
    """Closes the default factory; once it is closed, the next use makes a new one."""
    global _default
    factory = _default
    if factory is not None:
        try:
            factory.close(timeout)
        finally:
            with _default_lock:
                if factory.is_closed and _default is factory:
                    _default = None
