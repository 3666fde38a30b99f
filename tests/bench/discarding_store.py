"""A server over TLS that discards what is put there, for a third of the CPU time that its senders need.

It decrypts the head of a request; the records of the body are dropped by the kernel, unread. So the connection can't be
used again, and is closed after the answer.

``python -m tests.bench.discarding_store CERT KEY`` prints its address, and serves until its input ends.
"""

import re
import socket
import ssl
import sys
import threading
from typing import Final

_RECORD: Final = 16 << 10
"""Bytes of a full record of TLS."""
_OVERHEAD: Final = 22
"""Of a record of TLS 1.3 with AES-GCM: header, content type, tag."""
_AT_ONCE: Final = 1 << 20
"""Bytes that are dropped at a time."""


def serve(connection: socket.socket, context: ssl.SSLContext) -> None:
    """Answers one request."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with context.wrap_socket(connection, server_side=True) as encrypted:
        head = b""
        # A sender writes it by itself, so the body's records stay in the kernel.
        while not head.endswith(b"\r\n\r\n"):
            head += encrypted.recv(_RECORD)
        found = re.search(rb"content-length: (\d+)", head.lower())
        assert found is not None, head
        _drop(encrypted, int(found[1]))
        encrypted.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def _drop(encrypted: ssl.SSLSocket, length: int) -> None:
    """Drops the records of so many bytes."""
    left = length + _OVERHEAD * -(-length // _RECORD)
    buffer = bytearray(_AT_ONCE)
    while left:
        # Not through TLS; and the kernel copies nothing.
        count = socket.socket.recv_into(encrypted, buffer, min(left, _AT_ONCE), socket.MSG_TRUNC)
        if not count:
            raise ConnectionResetError("the peer has ended it")
        left -= count


def main() -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(*sys.argv[1:3])
    listening = socket.create_server(("127.0.0.1", 0))
    print(f"https://127.0.0.1:{listening.getsockname()[1]}", flush=True)

    def accept() -> None:
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=serve, args=(connection, context), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
