"""What no upload can do without: bytes are read from memory, checksummed, and sent through blocking sockets.

Each file goes up in one request of a resumable upload, in a thread of its own, as a store of GCS' API takes it.
"""

import json
import os
import socket
import ssl
import threading
import urllib.request
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import crc32c

PIECE: Final = 256 << 10
BUCKET: Final = "bucket"


def begin(store: str, name: str, tls: ssl.SSLContext | None) -> str:
    """The address of a new upload session."""
    request = urllib.request.Request(
        f"{store}/upload/storage/v1/b/{BUCKET}/o?uploadType=resumable",
        data=json.dumps({"name": name}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60, context=tls) as answer:
        location: str = answer.headers["Location"]
    return location


def send(address: str, source: Path, start: int, length: int, tls: ssl.SSLContext | None) -> None:
    """Sends a part of ``source`` as the whole of a session's object. Raises RuntimeError."""
    url = urlsplit(address)
    assert url.hostname is not None
    buffer, crc = memoryview(bytearray(PIECE)), 0
    with socket.create_connection((url.hostname, url.port), 60) as plain, source.open("rb") as file:
        connection = plain if tls is None else tls.wrap_socket(plain, server_hostname=url.hostname)
        with connection:
            connection.sendall(
                f"PUT {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\n"
                f"Content-Length: {length}\r\n"
                f"Content-Range: bytes 0-{length - 1}/{length}\r\n\r\n".encode()
            )
            for at in range(start, start + length, PIECE):
                piece = buffer[: start + length - at]
                os.preadv(file.fileno(), [piece], at)
                crc = crc32c.crc32c(piece, crc)
                connection.sendall(piece)
            status = connection.recv(4096).split(b"\r\n")[0]
    if b" 200 " not in status:
        raise RuntimeError(f"a bare upload was refused: {status!r}")


def send_all(store: str, name: str, source: Path, sockets: int, tls: ssl.SSLContext | None) -> None:
    """Sends ``source`` as so many objects at the same time. Raises RuntimeError."""
    length = source.stat().st_size // sockets // PIECE * PIECE
    errors: list[Exception] = []

    def upload(number: int) -> None:
        try:
            address = begin(store, f"{name}/{number}", tls)
            send(address, source, number * length, length, tls)
        except (OSError, RuntimeError) as error:
            errors.append(error)

    threads = [threading.Thread(target=upload, args=(number,)) for number in range(sockets)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise RuntimeError(f"bare uploads failed: {errors}")
