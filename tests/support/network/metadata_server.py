"""A machine's metadata server, as Google's, which is late."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def late_metadata_server(refused: int) -> Iterator[dict[str, str]]:
    """The environment of a process whose first ``refused`` requests are answered with 503."""
    lock, count = threading.Lock(), 0

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal count
            with lock:
                count += 1
                early = count <= refused
            body = json.dumps(
                {
                    "access_token": "secret",
                    "expires_in": 3600,
                    "token_type": "Bearer",
                    "email": "pod@example.com",
                    "scopes": [],
                }
            ).encode()
            if "project-id" in self.path:
                body = b"project"
            self.send_response(503 if early else 200)
            self.send_header("Metadata-Flavor", "Google")
            self.send_header(
                "Content-Type", "text/plain" if body == b"project" else "application/json"
            )
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"127.0.0.1:{server.server_address[1]}"
    try:
        yield {
            "GCE_METADATA_HOST": address,
            "GCE_METADATA_IP": address,
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
            "CLOUDSDK_CONFIG": "/nonexistent",
            "HOME": "/nonexistent",
        }
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
