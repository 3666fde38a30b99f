"""Objects in the GCS server's bucket, over the documented API, and faults that delay its uploads."""

import asyncio
import json
import re
import urllib.request
from typing import Any
from urllib.parse import quote, unquote

from pannier.maintenance.verify import verify
from pannier.storage import open_store
from support.processes.stretch import BOUND_S
from support.storage.gcs_server import GcsServer


def hold_up(server: GcsServer) -> None:
    """Uploads of large files are refused, and tried again, until ``server.clear()``."""
    server.fault(kind="status", method="POST", path="uploadType=resumable", status=503, times=-1)


def generations(server: GcsServer, prefix: str) -> dict[str, str]:
    """The objects below ``prefix``, by name.

    Without those of a moment, which a daemon makes and removes to learn storage's time.
    """
    found = _ask(server, f"?prefix={prefix}/").get("items", [])
    return {
        item["name"]: item["generation"] for item in found if "/.pannier/clock-" not in item["name"]
    }


def listed(server: GcsServer, prefix: str) -> list[str]:
    """Names of the objects below ``prefix``."""
    return list(generations(server, prefix))


def content(server: GcsServer, name: str) -> bytes:
    """Of the object of that name."""
    url = f"{server.url}/storage/v1/b/bucket/o/{quote(name, safe='')}?alt=media"
    with urllib.request.urlopen(url, timeout=BOUND_S, context=server.context) as response:
        found: bytes = response.read()
    return found


def data_reads(server: GcsServer, prefix: str) -> list[str]:
    """Reads of data files below ``prefix`` among the latest requests."""
    return [
        path
        for method, path, _ in server.requests()
        if method == "GET"
        and unquote(path).partition("?")[0].endswith(".distcp")
        and f"{prefix}/" in unquote(path)
    ]


def data_bytes(server: GcsServer, prefix: str) -> int:
    """Bytes of data files below ``prefix`` that the latest requests asked for, each for a range."""
    wanted = set(data_reads(server, prefix))
    total = 0
    for method, path, range_ in server.requests():
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", range_)
        if found is not None and method == "GET" and path in wanted:
            total += int(found[2]) + 1 - int(found[1])
        # Without a range it is a request for the object's size.
        assert found or path not in wanted or "alt=media" not in path, path
    return total


def remove(server: GcsServer, prefix: str) -> None:
    """Deletes all objects as a user does who knows of rule 1: ``.metadata`` first."""
    for name in sorted(listed(server, prefix), key=lambda name: not name.endswith("/.metadata")):
        _ask(server, f"/{quote(name, safe='')}", "DELETE")


def decisions_alone(server: GcsServer, place: str) -> bool:
    """Whether nothing of an aborted attempt is left but its decision."""
    names = listed(server, place)
    return len(names) == 1 and re.search(r"/\.pannier/i[^/]+/decision$", names[0]) is not None


def check_whole(server: GcsServer, checkpoint_id: str) -> None:
    """Raises AssertionError unless every object is there with the bytes that were recorded."""

    async def main() -> None:
        options = {"endpoint_url": server.url, "token": "anon"}
        store = open_store(checkpoint_id, storage_options=options)
        try:
            result = await verify(store, progress=lambda done, total: None)
        finally:
            await store.close()
        assert result.ok, result

    asyncio.run(main())


def _ask(server: GcsServer, path: str, method: str = "GET") -> Any:
    request = urllib.request.Request(f"{server.url}/storage/v1/b/bucket/o{path}", method=method)
    with urllib.request.urlopen(request, timeout=BOUND_S, context=server.context) as answer:
        return json.loads(answer.read() or b"null")
