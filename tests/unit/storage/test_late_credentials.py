"""A pod's first calls, while its metadata server is not there yet."""

import subprocess
import sys

import pytest

from support.network.metadata_server import late_metadata_server
from support.processes.daemons import clean_environment
from support.processes.stretch import BOUND_S

LATE = {
    "a trainer": """
from pannier.client.loading.filesystem import open_dir
found = open_dir("gs://bucket/root", OPTIONS)._fs.credentials
found.maybe_refresh()
print(found.credentials.token)
""",
    "a daemon": """
import asyncio, time
from pannier.storage.gcs.http import shared_connection
from pannier.storage.upload_threads import UploadThreads

async def main():
    connection = shared_connection(OPTIONS, UploadThreads())
    opened = await connection.get(time.monotonic() + 20)
    found = opened._fs.credentials
    found.maybe_refresh()
    print(found.credentials.token)
    await connection.release()

asyncio.run(main())
""",
}


@pytest.mark.parametrize("who", LATE)
@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"token": "google_default"}, 3),
        # Longer than google-auth tries by itself: then gcsfs goes on as an anonymous user.
        pytest.param({}, 6, marks=pytest.mark.slow),
    ],
)
def test_credentials_of_a_late_metadata_server_are_waited_for_by(
    who: str, options: dict[str, str], refused: int
) -> None:
    with late_metadata_server(refused) as environment:
        done = subprocess.run(
            [sys.executable, "-c", f"OPTIONS = {options!r}\n{LATE[who]}"],
            env=clean_environment(environment),
            capture_output=True,
            text=True,
            timeout=2 * BOUND_S,
        )
    assert done.stdout.strip() == "secret", done
