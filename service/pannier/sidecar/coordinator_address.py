"""Where a sidecar's coordinator is: as it was told, or whoever came after one that is gone.

In: an address, TLS files, and a file that may appear later. Out: channels. A job on several hosts
that was started again has another coordinator; its former sidecars stay with theirs as long as
that answers, and have their saves ended by the new one when it doesn't. Event loop only.
"""

import json
import logging
import time
from pathlib import Path
from typing import Final

import grpc

from pannier.wire.addresses import channel_options, keepalive_options, parse_address
from pannier.wire.errors import ConfigurationError
from pannier.wire.tls import Tls, is_unix, open_aio_channel

_log = logging.getLogger(__name__)

SUCCEED_S: Final = 10.0
"""A coordinator that couldn't be attached to for so long is gone, if there is a successor."""


class Whereabouts:
    """One coordinator's place at a time.

    Args:
        address: of the coordinator.
        tls: for one on TCP; None: plaintext.
        successor: JSON file with ``coordinator``, an address, and on TCP the paths ``cert``,
            ``key`` and ``ca``; None: there never is one.
    """

    def __init__(self, address: str, tls: Tls | None, successor: Path | None) -> None:
        self.address = address
        self._tls = tls
        self._successor = successor
        self._lost: float | None = time.monotonic()
        """Since when it isn't attached."""

    def found(self) -> None:
        """The sidecar is attached there."""
        self._lost = None

    def moved(self) -> bool:
        """Whether the next attempt takes a new channel; to be asked before each."""
        if self._lost is None:
            self._lost = time.monotonic()
        # Asked for both: certificates may be renewed on the way.
        renewed = self._tls is not None and self._tls.changed()
        return self._follow() or renewed

    def open(self) -> grpc.aio.Channel:
        """A channel to where it is now."""
        options = [*channel_options(), *keepalive_options()]
        return open_aio_channel(self.address, options, self._tls)

    def _follow(self) -> bool:
        assert self._lost is not None
        if self._successor is None or time.monotonic() - self._lost < SUCCEED_S:
            return False
        try:
            told = json.loads(self._successor.read_text())
            address = parse_address(str(told["coordinator"]), setting=str(self._successor))
            if address == self.address:
                return False
            files = [Path(told[name]) for name in ("cert", "key", "ca")] if "cert" in told else []
            tls = None if is_unix(address) or not files else Tls(*files)
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError, ConfigurationError) as error:
            _log.warning("%s names no coordinator that can be used: %s", self._successor, error)
            return False
        _log.warning(
            "the coordinator at %s is gone; the one at %s, of the job's next start, ends its saves",
            *(self.address, address),
        )
        self.address, self._tls, self._lost = address, tls, time.monotonic()
        return True
