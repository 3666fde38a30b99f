"""moto's S3 on 127.0.0.1, in a thread of this process."""

import threading
from types import TracebackType

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

_KEYS = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}


class _Quiet(WSGIRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Nobody reads it."""


class S3Server:
    """``with S3Server() as server``; has the bucket ``bucket``."""

    def __enter__(self) -> "S3Server":
        # One request at a time: moto looks and puts in two steps.
        self._server = make_server(
            "127.0.0.1",
            0,
            DomainDispatcherApplication(create_backend_app),
            threaded=False,
            request_handler=_Quiet,
        )
        self.url = f"http://127.0.0.1:{self._server.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.client = boto3.client("s3", endpoint_url=self.url, region_name="us-east-1", **_KEYS)
        self.client.create_bucket(Bucket="bucket")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def options(self) -> dict[str, object]:
        """Storage options."""
        return {"key": "test", "secret": "test", "endpoint_url": self.url}
