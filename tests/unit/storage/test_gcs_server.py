"""The test server against what the JSON API documents, and plain gcsfs and torch against it."""

import base64
import hashlib
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import quote

import crc32c
import pytest
import torch
import torch.distributed.checkpoint as dcp
from gcsfs.core import GCSFileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from support.processes.stretch import BOUND_S
from support.storage.gcs_server import GcsServer

GRANULE = 256 << 10


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    with GcsServer(tmp_path_factory.mktemp("gcs"), buckets=["bucket", "other"]) as running:
        yield running


@pytest.fixture(autouse=True)
def no_faults(server: GcsServer) -> Iterator[None]:
    yield
    server.clear()


class Answer:
    def __init__(self, status: int, headers: Message, body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any) -> None:
        return None


def call(
    method: str, url: str, data: bytes | None = None, headers: dict[str, str] | None = None
) -> Answer:
    request = urllib.request.Request(url, data=data, method=method, headers=headers or {})
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=BOUND_S) as response:
            return Answer(response.status, response.headers, response.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.headers, error.read())


def put(
    server: GcsServer, name: str, data: bytes, query: str = "", bucket: str = "bucket"
) -> Answer:
    url = f"{server.url}/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(name, '')}"
    return call("POST", url + query, data)


def url_of(server: GcsServer, name: str, query: str = "", bucket: str = "bucket") -> str:
    return f"{server.url}/storage/v1/b/{bucket}/o/{quote(name, safe='')}{query}"


def crc_of(data: bytes) -> str:
    return base64.b64encode(crc32c.crc32c(data).to_bytes(4, "big")).decode()


def test_an_object_s_resource(server: GcsServer) -> None:
    first = put(server, "a/ü b", b"content").json
    second = put(server, "a/ü b", b"content2").json
    assert int(second["generation"]) > int(first["generation"])
    got = call("GET", url_of(server, "a/ü b")).json
    assert got == second
    assert (got["kind"], got["bucket"], got["name"]) == ("storage#object", "bucket", "a/ü b")
    assert (got["size"], got["metageneration"]) == ("8", "1")
    assert got["crc32c"] == crc_of(b"content2")
    assert got["md5Hash"] == base64.b64encode(hashlib.md5(b"content2").digest()).decode()


@pytest.mark.parametrize("range_", ["bytes=2-4", "bytes=7-", "bytes=-3", "bytes=0-0", "bytes=5-99"])
def test_ranged_reads(server: GcsServer, range_: str) -> None:
    put(server, "digits", b"0123456789")
    answer = call("GET", url_of(server, "digits", "?alt=media"), headers={"Range": range_})
    start, _, end = range_.removeprefix("bytes=").partition("-")
    expected = b"0123456789"[int(start) : int(end) + 1 if end else None] if start else b"789"
    assert (answer.status, answer.body) == (206, expected)
    assert answer.headers["Content-Range"].endswith("/10")
    assert f"crc32c={crc_of(b'0123456789')}" in answer.headers["X-Goog-Hash"]
    whole = call("GET", url_of(server, "digits", "?alt=media"))
    assert (whole.status, whole.body) == (200, b"0123456789")
    beyond = call("GET", url_of(server, "digits", "?alt=media"), headers={"Range": "bytes=10-"})
    assert beyond.status == 416


def test_preconditions(server: GcsServer) -> None:
    assert put(server, "p", b"1", "&ifGenerationMatch=0").status == 200
    refused = put(server, "p", b"2", "&ifGenerationMatch=0")
    assert refused.status == 412
    assert refused.json["error"]["errors"][0]["reason"] == "conditionNotMet"
    generation = call("GET", url_of(server, "p")).json["generation"]
    assert put(server, "p", b"3", f"&ifGenerationMatch={generation}").status == 200
    assert put(server, "p", b"4", f"&ifGenerationMatch={generation}").status == 412
    assert call("GET", url_of(server, "p", "?alt=media")).body == b"3"
    assert call("GET", url_of(server, "p", f"?generation={generation}")).status == 404
    current = call("GET", url_of(server, "p")).json["generation"]
    assert call("GET", url_of(server, "p", f"?ifGenerationNotMatch={current}")).status == 304
    assert call("DELETE", url_of(server, "p", f"?ifGenerationMatch={generation}")).status == 412
    patched = call("PATCH", url_of(server, "p"), b'{"metadata": {"k": "v"}}').json
    assert (patched["metageneration"], patched["metadata"]) == ("2", {"k": "v"})
    assert put(server, "p", b"5", "&ifMetagenerationMatch=1").status == 412
    assert call("DELETE", url_of(server, "p", f"?ifGenerationMatch={current}")).status == 204
    assert call("DELETE", url_of(server, "p")).status == 404


@pytest.mark.parametrize("newline", ["\r\n", "\n"])
def test_multipart_uploads_check_the_checksum(server: GcsServer, newline: str) -> None:
    data = b"--==0==\r\nnot a boundary\r\n" * 3 + b"\r"

    def upload(crc: str) -> Answer:
        parts = [
            "--==1==",
            "Content-Type: application/json; charset=UTF-8",
            "",
            json.dumps({"name": "m", "crc32c": crc, "metadata": {"a": "b"}}),
            "--==1==",
            "Content-Type: application/octet-stream",
            "",
            "",
        ]
        end = f"{newline}--==1==--"
        return call(
            "POST",
            f"{server.url}/upload/storage/v1/b/bucket/o?uploadType=multipart",
            newline.join(parts).encode() + data + end.encode(),
            {"Content-Type": 'multipart/related; boundary="==1=="'},
        )

    assert upload(crc_of(b"other")).status == 400
    assert call("GET", url_of(server, "m")).status == 404
    answer = upload(crc_of(data))
    assert (answer.status, answer.json["metadata"]) == (200, {"a": "b"})
    assert call("GET", url_of(server, "m", "?alt=media")).body == data
    call("DELETE", url_of(server, "m"))


def start(server: GcsServer, name: str, query: str = "", metadata: bytes = b"") -> str:
    url = f"{server.url}/upload/storage/v1/b/bucket/o?uploadType=resumable&name={name}{query}"
    answer = call("POST", url, metadata, {"Content-Type": "application/json"})
    assert answer.status == 200
    return str(answer.headers["Location"])


def chunk(session: str, data: bytes, range_: str, **headers: str) -> Answer:
    return call("PUT", session, data, {"Content-Range": f"bytes {range_}", **headers})


def test_resumable_uploads_go_in_chunks(server: GcsServer) -> None:
    data = bytes(range(256)) * 3000
    size = len(data)
    session = start(server, "r")
    assert (chunk(session, b"", f"*/{size}").status) == 308
    first = chunk(session, data[: 2 * GRANULE], f"0-{2 * GRANULE - 1}/*")
    assert (first.status, first.headers["Range"]) == (308, f"bytes=0-{2 * GRANULE - 1}")
    asked = chunk(session, b"", f"*/{size}")
    assert (asked.status, asked.headers["Range"]) == (308, f"bytes=0-{2 * GRANULE - 1}")
    assert call("GET", url_of(server, "r")).status == 404
    gap = chunk(session, data[-5:], f"{size - 5}-{size - 1}/{size}")
    assert gap.status == 503
    # Bytes that it holds already are ignored.
    last = chunk(session, data[GRANULE:], f"{GRANULE}-{size - 1}/{size}")
    assert (last.status, last.json["crc32c"]) == (200, crc_of(data))
    assert chunk(session, b"", f"*/{size}").json == last.json
    assert call("GET", url_of(server, "r", "?alt=media")).body == data


def test_an_unfinished_chunk_is_kept_in_granules(server: GcsServer) -> None:
    session = start(server, "g")
    answer = chunk(session, bytes(GRANULE + 1000), f"0-{GRANULE + 999}/*")
    assert answer.headers["Range"] == f"bytes=0-{GRANULE - 1}"
    assert "Range" not in chunk(start(server, "g"), bytes(1000), "0-999/*").headers


def test_resumable_uploads_can_be_cancelled_and_checked(server: GcsServer) -> None:
    session = start(server, "c")
    chunk(session, bytes(GRANULE), f"0-{GRANULE - 1}/*")
    assert call("DELETE", session).status == 499
    assert chunk(session, b"", "*/*").status in (404, 410)
    session = start(server, "c")
    wrong = chunk(session, b"abc", "0-2/3", **{"X-Goog-Hash": f"crc32c={crc_of(b'abd')}"})
    assert wrong.status == 400
    assert "crc32c" in wrong.json["error"]["message"].lower()
    put(server, "c", b"first")
    session = start(server, "c2", "&ifGenerationMatch=0")
    put(server, "c2", b"meanwhile")
    assert chunk(session, b"late", "0-3/4").status == 412
    assert call("GET", url_of(server, "c2", "?alt=media")).body == b"meanwhile"
    single = call("PUT", start(server, "c3"), b"all at once")
    assert (single.status, single.json["size"]) == (200, "11")


def test_listing(server: GcsServer) -> None:
    names = ["l/a", "l/b/1", "l/b/2", "l/c", "l/d/e/f"]
    for name in names:
        put(server, name, b"", bucket="other")
    base = f"{server.url}/storage/v1/b/other/o"
    everything = call("GET", f"{base}?prefix=l/").json
    assert [item["name"] for item in everything["items"]] == names
    folded = call("GET", f"{base}?prefix=l/&delimiter=/").json
    assert [item["name"] for item in folded["items"]] == ["l/a", "l/c"]
    assert folded["prefixes"] == ["l/b/", "l/d/"]
    seen: list[str] = []
    token = ""
    for _ in range(5):
        page = call("GET", f"{base}?prefix=l/&delimiter=/&maxResults=1&pageToken={token}").json
        seen += [item["name"] for item in page.get("items", [])] + page.get("prefixes", [])
        token = quote(page.get("nextPageToken", ""))
        if not token:
            break
    assert seen == ["l/a", "l/b/", "l/c", "l/d/"]
    ranged = call("GET", f"{base}?startOffset=l/b&endOffset=l/c").json
    assert [item["name"] for item in ranged["items"]] == ["l/b/1", "l/b/2"]
    assert "items" not in call("GET", f"{base}?prefix=none").json


def test_compose_copy_rewrite_and_move(server: GcsServer) -> None:
    put(server, "s1", b"one")
    generation = put(server, "s2", b"two").json["generation"]
    order = {"sourceObjects": [{"name": "s1"}, {"name": "s2", "generation": generation}]}
    composed = call("POST", url_of(server, "both") + "/compose", json.dumps(order).encode()).json
    assert (composed["componentCount"], composed["crc32c"]) == (2, crc_of(b"onetwo"))
    assert "md5Hash" not in composed
    again = call(
        "POST", url_of(server, "both") + "/compose?ifGenerationMatch=0", json.dumps(order).encode()
    )
    assert again.status == 412
    copied = call("POST", url_of(server, "s1") + "/copyTo/b/other/o/a%2Fcopy", b"")
    assert (copied.status, copied.json["name"]) == (200, "a/copy")
    rewritten = call("POST", url_of(server, "s1") + "/rewriteTo/b/other/o/r", b"").json
    assert (rewritten["done"], rewritten["resource"]["size"]) == (True, "3")
    assert call("POST", url_of(server, "s1") + "/moveTo/o/s3", b"").json["name"] == "s3"
    assert call("GET", url_of(server, "s1")).status == 404
    assert call("GET", url_of(server, "s3", "?alt=media")).body == b"one"


def test_buckets(server: GcsServer) -> None:
    base = f"{server.url}/storage/v1/b"
    assert call("POST", f"{base}?project=p", b'{"name": "fresh-bucket"}').status == 200
    assert call("POST", f"{base}?project=p", b'{"name": "fresh-bucket"}').status == 409
    assert call("GET", f"{base}/fresh-bucket").json["kind"] == "storage#bucket"
    assert call("DELETE", f"{base}/fresh-bucket").status == 204
    missing = call("GET", f"{base}/fresh-bucket/o")
    assert (missing.status, missing.json["error"]["code"]) == (404, 404)
    assert "bucket does not exist" in missing.json["error"]["message"]


def test_faults_befall_the_requests_they_name(server: GcsServer) -> None:
    server.fault(kind="status", method="GET", path="o/f1", status=429, times=2, skip=1)
    put(server, "f1", b"x")
    put(server, "f2", b"x")
    statuses = [call("GET", url_of(server, "f1")).status for _ in range(4)]
    assert statuses == [200, 429, 429, 200]
    assert call("GET", url_of(server, "f2")).status == 200
    assert server.faults()[0]["hits"] == 2
    server.fault(kind="reset", path="o/f2")
    with pytest.raises(OSError, match=r"reset|closed"):
        call("GET", url_of(server, "f2"))
    server.fault(kind="lost", method="POST")
    with pytest.raises(OSError, match=r"reset|closed"):
        put(server, "f3", b"done all the same")
    assert call("GET", url_of(server, "f3", "?alt=media")).body == b"done all the same"
    server.fault(kind="corrupt", method="GET")
    assert call("GET", url_of(server, "f3", "?alt=media")).body != b"done all the same"


def test_plain_gcsfs(server: GcsServer, tmp_path: Path) -> None:
    fs = GCSFileSystem(
        token="anon", endpoint_url=server.url, skip_instance_cache=True, use_listings_cache=False
    )
    big = bytes(range(256)) * (24 << 10)
    fs.pipe_file("bucket/plain/small", b"small")
    with fs.open("bucket/plain/big", "wb", block_size=1 << 20) as file:
        file.write(big)
    assert fs.cat_file("bucket/plain/big") == big
    assert fs.cat_file("bucket/plain/big", 1000, 2000) == big[1000:2000]
    assert fs.info("bucket/plain/big")["size"] == len(big)
    assert sorted(fs.ls("bucket/plain", detail=False)) == ["bucket/plain/big", "bucket/plain/small"]
    assert fs.find("bucket/plain") == ["bucket/plain/big", "bucket/plain/small"]
    with pytest.raises(FileExistsError):
        fs.pipe_file("bucket/plain/small", b"again", mode="create")
    fs.cp_file("bucket/plain/small", "bucket/plain/copy")
    fs.merge("bucket/plain/merged", ["bucket/plain/small", "bucket/plain/copy"])
    assert fs.cat_file("bucket/plain/merged") == b"smallsmall"
    fs.put_file(__file__, "bucket/plain/file")
    fs.get_file("bucket/plain/file", str(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == Path(__file__).read_bytes()
    fs.rm("bucket/plain", recursive=True)
    assert not fs.exists("bucket/plain")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_saves_and_loads_a_checkpoint(
    server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    state = {"weight": torch.arange(1000.0), "step": 7}
    options = {"token": "anon", "skip_instance_cache": True}
    dcp.save(state, storage_writer=FsspecWriter("gs://bucket/torch/1", **options), no_dist=True)
    loaded = {"weight": torch.zeros(1000), "step": 0}
    dcp.load(loaded, storage_reader=FsspecReader("gs://bucket/torch/1", **options), no_dist=True)
    assert torch.equal(loaded["weight"], state["weight"])
    assert loaded["step"] == 7


def test_it_runs_by_hand_and_ends_on_sigterm(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "support.storage.gcs_server", "--port", "0"]
    command += ["--dir", str(tmp_path / "objects"), "--bucket", "mine"]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        assert call("GET", f"{address}/storage/v1/b/mine").status == 200
        process.terminate()
        assert process.wait(BOUND_S) == 0
