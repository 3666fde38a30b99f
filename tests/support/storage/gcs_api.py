"""The JSON API of Google Cloud Storage, as far as it is documented and clients use it.

Requests come in, objects of :mod:`support.storage.gcs_objects` go out; faults come in between.
"""

import asyncio
import json
import re
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from aiohttp import web

from support.storage.gcs_faults import Fault, Faults
from support.storage.gcs_objects import HOLDS, Bucket, Content, Objects, Refused
from support.storage.jitter import Jitter

GRANULE = 256 << 10
"""An unfinished upload holds a multiple of this."""
OPTIONS = ("ignore_preconditions", "ignore_delete_preconditions", "ignore_checksums")
_KEPT_REQUESTS = 100_000
_OBJECT = r"/storage/v1/b/(?P<bucket>[^/]+)/o/(?P<name>[^/]+)"
_ROUTES = [
    (method, re.compile(pattern), handler)
    for method, pattern, handler in (
        ("POST|PUT", r"/(resumable/)?upload/storage/v1/b/(?P<bucket>[^/]+)/o", "upload"),
        ("DELETE", r"/upload/storage/v1/b/(?P<bucket>[^/]+)/o", "cancel_upload"),
        ("GET", r"(/download)?" + _OBJECT, "get_object"),
        ("DELETE", _OBJECT, "delete_object"),
        ("PATCH", _OBJECT, "patch_object"),
        ("POST", _OBJECT + "/compose", "compose"),
        (
            "POST",
            _OBJECT + r"/(?P<verb>copyTo|rewriteTo)/b/(?P<to_bucket>[^/]+)/o/(?P<to_name>[^/]+)",
            "copy",
        ),
        ("POST", _OBJECT + r"/(?P<verb>moveTo)/o/(?P<to_name>[^/]+)", "copy"),
        ("GET", r"/storage/v1/b/(?P<bucket>[^/]+)/o/?", "list_objects"),
        ("GET", r"/storage/v1/b/(?P<bucket>[^/]+)", "get_bucket"),
        ("GET", r"/storage/v1/b/(?P<bucket>[^/]+)/storageLayout", "get_layout"),
        ("DELETE", r"/storage/v1/b/(?P<bucket>[^/]+)", "delete_bucket"),
        ("GET", r"/storage/v1/b/?", "list_buckets"),
        ("POST", r"/storage/v1/b/?", "create_bucket"),
        (".*", r"/_admin/(?P<what>\w+)", "admin"),
    )
]


class Cut(Exception):
    """The connection is to be reset."""


@dataclass
class Session:
    """A resumable upload."""

    bucket: str
    metadata: dict[str, Any]
    query: dict[str, str]
    content: Content
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    resource: dict[str, Any] | None = None


@dataclass
class Call:
    """A request, taken apart."""

    request: web.Request
    match: dict[str, str]
    query: dict[str, str]
    fault: Fault | None

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes in, through the fault."""
        fault = self.fault
        left = fault.bytes if fault and fault.kind == "partial" else None
        corrupt = fault is not None and fault.kind == "corrupt"
        async for data in self.request.content.iter_any():
            piece = flipped(data) if corrupt and data else data
            corrupt = False
            if left is not None and len(piece) >= left:
                yield piece[:left]
                raise Cut
            if left is not None:
                left -= len(piece)
            yield piece

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def json(self) -> dict[str, Any]:
        body = await self.body()
        try:
            value = json.loads(body) if body else {}
        except ValueError:
            raise Refused(400, "Parse Error", "parseError") from None
        if not isinstance(value, dict):
            raise Refused(400, "Parse Error", "parseError")
        return value


def flipped(data: bytes) -> bytes:
    """``data`` with one bit changed in its middle."""
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


class Service:
    """The API; in one event loop. Usable without a process: ``web.AppRunner(Service(dir).app)``."""

    def __init__(self, directory: Path, buckets: Iterable[str] = (), seed: int = 0) -> None:
        self.objects = Objects(directory)
        self.faults = Faults()
        self.released = asyncio.Event()
        """Ends the delays of requests that wait."""
        self.sessions: dict[str, Session] = {}
        self.requests: list[list[Any]] = []
        self._jitter = Jitter(seed)
        for name in buckets:
            self.objects.buckets[name] = Bucket(name)
        self.app = web.Application()
        self.app.router.add_route("*", "/{path:.*}", self._handle)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        url = urlsplit(request.raw_path)
        content_range = request.headers.get("Content-Range", "")
        own = url.path.startswith("/_admin/")
        fault = None
        if not own:
            fault = self.faults.find(
                request.method,
                request.raw_path,
                content_range=content_range,
                authorization=request.headers.get("Authorization", ""),
            )
        if not own:
            range_ = content_range or request.headers.get("Range", "")
            self.requests.append([request.method, request.raw_path, range_])
            del self.requests[:-_KEPT_REQUESTS]
        before_s, after_s = (0.0, 0.0) if own else self._jitter.next_s()
        await asyncio.sleep(before_s)
        try:
            if fault and fault.kind == "delay":
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.released.wait(), fault.seconds)
            if fault and fault.kind == "reset":
                raise Cut
            if fault and fault.kind == "status":
                await drain(request)
                return error(fault.status, fault.message, fault.reason, fault.headers or {})
            answer = await self._route(request, url.path, url.query, fault)
            await asyncio.sleep(after_s)
            if fault and fault.kind == "answered":
                return web.Response(status=fault.status, text=fault.body, headers=fault.headers)
            if fault and fault.kind == "lost":
                raise Cut
            return answer
        except Refused as refused:
            await drain(request)
            if fault and fault.kind == "lost":
                cut(request)
            return error(refused.status, refused.message, refused.reason, {})
        except Cut:
            cut(request)
            return web.Response()

    async def _route(
        self, request: web.Request, path: str, query: str, fault: Fault | None
    ) -> web.StreamResponse:
        for method, pattern, name in _ROUTES:
            match = pattern.fullmatch(path)
            if match and re.fullmatch(method, request.method):
                groups = {k: unquote(v) for k, v in match.groupdict().items() if v is not None}
                parameters = dict(parse_qsl(query, keep_blank_values=True))
                handler = getattr(self, f"_{name}")
                result: web.StreamResponse = await handler(Call(request, groups, parameters, fault))
                return result
        raise Refused(404, f"Not Found: {request.method} {path}", "notFound")

    # -- uploads

    async def _upload(self, call: Call) -> web.Response:
        bucket = call.match["bucket"]
        self.objects.bucket(bucket)
        kind = call.query.get("uploadType", "media")
        if "upload_id" in call.query:
            return await self._chunk(call)
        if kind == "resumable":
            return await self._start(call, bucket)
        if kind == "multipart":
            metadata, data = split_related(
                call.request.headers.get("Content-Type", ""), await call.body()
            )
            metadata.setdefault("name", call.query.get("name"))
            content = self.objects.content()
            content.write(data)
        else:
            metadata = {
                "name": call.query.get("name"),
                "contentType": call.request.headers.get("Content-Type", ""),
            }
            content = self.objects.content()
            await receive(call, content)
        apply_hash_header(metadata, call.request)
        if not metadata["name"]:
            content.discard()
            raise Refused(400, "Required parameter: name", "required")
        return web.json_response(self._commit(bucket, metadata, content, call.query))

    def _commit(
        self, bucket: str, metadata: dict[str, Any], content: Content, query: dict[str, str]
    ) -> dict[str, Any]:
        return self.objects.commit(bucket, metadata, content, query).resource

    async def _start(self, call: Call, bucket: str) -> web.Response:
        metadata = await call.json()
        metadata.setdefault("name", call.query.get("name"))
        if not metadata["name"]:
            raise Refused(400, "Required parameter: name", "required")
        metadata.setdefault(
            "contentType",
            call.request.headers.get("X-Upload-Content-Type", "application/octet-stream"),
        )
        existing = self.objects.bucket(bucket).objects.get(metadata["name"])
        self.objects.check(existing, call.query)
        upload_id = uuid.uuid4().hex
        self.sessions[upload_id] = Session(bucket, metadata, call.query, self.objects.content())
        location = (
            f"{call.request.scheme}://{call.request.host}/upload/storage/v1/b/{quote(bucket)}/o"
            f"?uploadType=resumable&name={quote(metadata['name'], safe='')}&upload_id={upload_id}"
        )
        return web.Response(headers={"Location": location, "X-GUploader-UploadID": upload_id})

    def _session(self, call: Call) -> Session:
        session = self.sessions.get(call.query.get("upload_id", ""))
        if session is None:
            raise Refused(404, "Upload session not found", "notFound")
        return session

    async def _chunk(self, call: Call) -> web.Response:
        session = self._session(call)
        header = call.request.headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", header)
        if header and match is None:
            raise Refused(400, f"Invalid Content-Range: {header}")
        async with session.lock:
            if session.resource is not None:
                await drain(call.request)
                return web.json_response(session.resource)
            content = session.content
            total = None if match is None or match[3] == "*" else int(match[3])
            if match is None or match[1] is not None:
                start = int(match[1]) if match else 0
                if start > content.size:
                    raise Refused(
                        503,
                        f"Invalid request. According to the Content-Range header, the upload "
                        f"offset is {start} byte(s), which exceeds already uploaded size of "
                        f"{content.size} byte(s).",
                        "backendError",
                    )
                try:
                    await receive(call, content, skip=content.size - start)
                except BaseException:
                    content.truncate(content.size // GRANULE * GRANULE)
                    raise
                if match is None:
                    total = content.size
            else:
                await drain(call.request)
            if total is not None and content.size > total:
                content.truncate(total // GRANULE * GRANULE)
                raise Refused(400, "More bytes were sent than Content-Range announced")
            if content.size != total:
                content.truncate(content.size // GRANULE * GRANULE)
                held = {"Range": f"bytes=0-{content.size - 1}"} if content.size else {}
                return web.Response(status=308, reason="Resume Incomplete", headers=held)
            if call.fault and call.fault.kind == "unfinished":
                return web.Response(
                    status=308,
                    reason="Resume Incomplete",
                    headers={"Range": f"bytes=0-{content.size - 1}"},
                )
            apply_hash_header(session.metadata, call.request)
            try:
                session.resource = self._commit(
                    session.bucket, session.metadata, content, session.query
                )
            except Refused:
                self.sessions.pop(call.query["upload_id"], None)
                raise
            return web.json_response(session.resource)

    async def _cancel_upload(self, call: Call) -> web.Response:
        session = self._session(call)
        async with session.lock:
            self.sessions.pop(call.query["upload_id"], None)
            if session.resource is None:
                session.content.discard()
        return web.Response(status=499, reason="Client Closed Request")

    # -- objects

    async def _get_object(self, call: Call) -> web.StreamResponse:
        bucket, name = call.match["bucket"], call.match["name"]
        found = self.objects.get(bucket, name, call.query.get("generation"))
        self.objects.check(found, call.query)
        media = call.query.get("alt") == "media" or call.request.path.startswith("/download/")
        if not media:
            return web.json_response(found.resource)
        start, end, status = 0, found.size, 200
        match = re.fullmatch(r"bytes=(\d*)-(\d*)", call.request.headers.get("Range", ""))
        if match and (match[1] or match[2]):
            status = 206
            if not match[1]:
                start = max(0, found.size - int(match[2]))
            else:
                start = int(match[1])
                end = min(found.size, int(match[2]) + 1) if match[2] else found.size
            if start >= found.size or end <= start:
                return error(416, "The requested range cannot be satisfied.", "requestedRange", {})
        hashes = [f"crc32c={found.resource['crc32c']}"]
        if "md5Hash" in found.resource:
            hashes.append(f"md5={found.resource['md5Hash']}")
        response = web.StreamResponse(
            status=status,
            headers={
                "Content-Type": found.resource["contentType"],
                "Content-Length": str(end - start),
                "Accept-Ranges": "bytes",
                "ETag": found.resource["etag"],
                "X-Goog-Generation": found.generation,
                "X-Goog-Metageneration": found.metageneration,
                "X-Goog-Hash": ",".join(hashes),
                "X-Goog-Stored-Content-Length": str(found.size),
                "X-Goog-Stored-Content-Encoding": "identity",
                "X-Goog-Storage-Class": "STANDARD",
            },
        )
        if status == 206:
            response.headers["Content-Range"] = f"bytes {start}-{end - 1}/{found.size}"
        # Open first: a replaced generation stays readable for who began to read it.
        with found.path.open("rb") as file:
            file.seek(start)
            await response.prepare(call.request)
            corrupt = call.fault is not None and call.fault.kind == "corrupt"
            left = end - start
            if call.fault and call.fault.kind == "partial":
                await response.write(file.read(call.fault.bytes))
                raise Cut
            while left and (piece := file.read(min(left, 1 << 20))):
                await response.write(flipped(piece) if corrupt else piece)
                corrupt = False
                left -= len(piece)
        await response.write_eof()
        return response

    async def _delete_object(self, call: Call) -> web.Response:
        self.objects.delete(call.match["bucket"], call.match["name"], call.query)
        return web.Response(status=204)

    async def _patch_object(self, call: Call) -> web.Response:
        found = self.objects.get(call.match["bucket"], call.match["name"])
        self.objects.check(found, call.query)
        changes = await call.json()
        for key in (*HOLDS, "metadata", "contentType", "cacheControl", "contentEncoding"):
            if key in changes:
                found.resource[key] = changes[key]
        found.resource["metageneration"] = str(int(found.metageneration) + 1)
        return web.json_response(found.resource)

    async def _list_objects(self, call: Call) -> web.Response:
        return web.json_response(self.objects.list(call.match["bucket"], call.query))

    async def _compose(self, call: Call) -> web.Response:
        order = await call.json()
        bucket = call.match["bucket"]
        sources = order.get("sourceObjects", [])
        if not 1 <= len(sources) <= 32:
            raise Refused(400, "The number of source components must be between 1 and 32.")
        found = []
        for source in sources:
            part = self.objects.get(bucket, source["name"], source.get("generation"))
            conditions = source.get("objectPreconditions", {})
            self.objects.check(part, {k: str(v) for k, v in conditions.items()})
            found.append(part)
        content = self.objects.content()
        for part in found:
            append_file(content, part.path)
        count = sum(int(part.resource.get("componentCount", 1)) for part in found)
        metadata = {**order.get("destination", {}), "name": call.match["name"]}
        metadata["componentCount"] = count
        return web.json_response(self._commit(bucket, metadata, content, call.query))

    async def _copy(self, call: Call) -> web.Response:
        source = self.objects.get(
            call.match["bucket"], call.match["name"], call.query.get("sourceGeneration")
        )
        conditions = {
            key.replace("ifSource", "if"): value
            for key, value in call.query.items()
            if key.startswith("ifSource")
        }
        self.objects.check(source, conditions)
        verb, to_bucket = call.match["verb"], call.match.get("to_bucket", call.match["bucket"])
        self.objects.bucket(to_bucket)
        kept = ("contentType", "metadata", "cacheControl", "contentEncoding")
        metadata = {key: source.resource[key] for key in kept if key in source.resource}
        metadata.update(await call.json())
        metadata["name"] = call.match["to_name"]
        content = self.objects.content()
        append_file(content, source.path)
        resource = self._commit(to_bucket, metadata, content, call.query)
        if verb == "moveTo":
            self.objects.delete(call.match["bucket"], call.match["name"], {})
        if verb != "rewriteTo":
            return web.json_response(resource)
        return web.json_response(
            {
                "kind": "storage#rewriteResponse",
                "totalBytesRewritten": resource["size"],
                "objectSize": resource["size"],
                "done": True,
                "resource": resource,
            }
        )

    # -- buckets

    async def _get_bucket(self, call: Call) -> web.Response:
        return web.json_response(bucket_resource(self.objects.bucket(call.match["bucket"])))

    async def _get_layout(self, call: Call) -> web.Response:
        bucket = self.objects.bucket(call.match["bucket"])
        return web.json_response(
            {
                "kind": "storage#storageLayout",
                "bucket": bucket.name,
                "location": "US-CENTRAL1" if bucket.zonal else "US",
                "locationType": "zone" if bucket.zonal else "multi-region",
                "hierarchicalNamespace": {"enabled": bucket.zonal},
            }
        )

    async def _list_buckets(self, call: Call) -> web.Response:
        items = [bucket_resource(self.objects.buckets[n]) for n in sorted(self.objects.buckets)]
        return web.json_response({"kind": "storage#buckets", "items": items})

    async def _create_bucket(self, call: Call) -> web.Response:
        order = await call.json()
        name = str(order.get("name", ""))
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", name):
            raise Refused(400, f"Invalid bucket name: '{name}'")
        if name in self.objects.buckets:
            raise Refused(409, "Your previous request to create the named bucket succeeded.")
        zonal = order.get("storageClass") == "RAPID"
        self.objects.buckets[name] = Bucket(name, zonal=zonal)
        return web.json_response(bucket_resource(self.objects.buckets[name]))

    async def _delete_bucket(self, call: Call) -> web.Response:
        if self.objects.bucket(call.match["bucket"]).objects:
            raise Refused(409, "The bucket you tried to delete is not empty.", "conflict")
        del self.objects.buckets[call.match["bucket"]]
        return web.Response(status=204)

    # -- controls

    async def _admin(self, call: Call) -> web.Response:
        what, method = call.match["what"], call.request.method
        if what == "faults" and method == "POST":
            self.faults.add(**await call.json())
        elif what == "faults" and method == "DELETE":
            self.faults.clear()
        elif what == "faults" and method == "PUT":
            self.faults.end_delays()
            self.released.set()
            self.released = asyncio.Event()
        elif what == "options" and method == "PUT":
            for name, value in (await call.json()).items():
                if name not in OPTIONS:
                    raise Refused(400, f"unknown option {name}")
                setattr(self.objects, name, bool(value))
        elif method != "GET":
            raise Refused(404, f"no such control: {method} {what}")
        answers = {
            "faults": self.faults.json,
            "options": dict,
            "requests": lambda: self.requests,
            "sessions": lambda: [k for k, s in self.sessions.items() if s.resource is None],
        }
        if what not in answers:
            raise Refused(404, f"no such control: {what}")
        return web.json_response(answers[what]())


async def receive(call: Call, content: Content, skip: int = 0) -> None:
    """Appends the body, but for its first ``skip`` bytes."""
    async for piece in call.pieces():
        content.write(piece[skip:])
        skip = max(0, skip - len(piece))


async def drain(request: web.Request) -> None:
    """Reads and drops the request's body, so that the client reads the answer."""
    async for _ in request.content.iter_any():
        pass


def append_file(content: Content, path: Path) -> None:
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            content.write(piece)


def apply_hash_header(metadata: dict[str, Any], request: web.Request) -> None:
    """Takes checksums from X-Goog-Hash, as the last request of an upload may bring them."""
    for item in request.headers.get("X-Goog-Hash", "").split(","):
        name, _, value = item.strip().partition("=")
        if name in ("crc32c", "md5"):
            metadata.setdefault("crc32c" if name == "crc32c" else "md5Hash", value)


def split_related(content_type: str, body: bytes) -> tuple[dict[str, Any], bytes]:
    """Metadata and content of a multipart/related body, with CRLF or, as gcsfs sends it, LF."""
    match = re.search(r"boundary=\"?([^\";]+)", content_type)
    boundary = b"--" + match[1].encode() if match else b""
    newline = b"\r\n" if body.startswith(boundary + b"\r\n") else b"\n"
    parts = body.split(newline + boundary, 1)
    end = parts[-1].rfind(newline + boundary + b"--")
    if not match or not body.startswith(boundary) or len(parts) != 2 or end < 0:
        raise Refused(400, "Malformed multipart body.", "badRequest")
    _, _, metadata = parts[0].partition(newline * 2)
    _, _, data = parts[1][:end].partition(newline * 2)
    try:
        return dict(json.loads(metadata)), data
    except ValueError:
        raise Refused(400, "Parse Error", "parseError") from None


def bucket_resource(bucket: Bucket) -> dict[str, Any]:
    return {
        "kind": "storage#bucket",
        "id": bucket.name,
        "name": bucket.name,
        "projectNumber": "0",
        "metageneration": "1",
        "location": "US",
        "locationType": "zone" if bucket.zonal else "multi-region",
        "storageClass": "RAPID" if bucket.zonal else "STANDARD",
        "timeCreated": bucket.created,
        "updated": bucket.created,
    }


def error(status: int, message: str, reason: str, headers: Any) -> web.Response:
    if status == 304:
        return web.Response(status=304)
    details = [{"message": message, "domain": "global", "reason": reason}]
    body = {"error": {"code": status, "message": message, "errors": details}}
    return web.json_response(body, status=status, headers=headers)


def cut(request: web.Request) -> None:
    """Resets the connection."""
    if request.transport is not None:
        request.transport.abort()
