"""Reports of a node's supervisor to its gateway, over a pair of stream sockets.

In: the state of all jobs, as JSON objects of any size. Out: the same objects, whole and in order; each
follows its length. The sending end is for the supervisor's only thread, the receiving end for the gateway's
event loop.
"""

import asyncio
import json
import logging
import socket
import struct
from collections.abc import Mapping
from typing import Any, Final

from pannier.common import timeouts

_log = logging.getLogger(__name__)

_LENGTH: Final = struct.Struct("<I")


class ReportSender:
    """The supervisor's end of ``connection``, which it owns. Blocking, for a moment; not thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(timeouts.CHECK_S)
        self._connection = connection
        self._unsent = bytearray()
        """The rest of the last report, of which the gateway may have received a part."""

    def send(self, report: Mapping[str, Any]) -> None:
        """Sends a report, after the rest of the last one.

        Returns early when the gateway has read nothing for ``timeouts.CHECK_S``, or has ended: the rest
        follows with the next call.
        """
        try:
            self._send_unsent()
            text = json.dumps(report).encode()
            self._unsent += _LENGTH.pack(len(text)) + text
            self._send_unsent()
        except (TimeoutError, ConnectionError):
            # Another report follows soon, and a gateway that has ended is started again with another sender.
            return
        except OSError as error:
            _log.warning("the gateway gets no report of the jobs: %s", error)

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def _send_unsent(self) -> None:
        while self._unsent:
            del self._unsent[: self._connection.send(self._unsent)]


async def read_report(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next report. To be awaited to its end: otherwise the next call would begin amid the report.

    Raises:
        EOFError: the supervisor has ended.
        ValueError: it is not JSON.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    report: dict[str, Any] = json.loads(await reader.readexactly(length))
    return report
