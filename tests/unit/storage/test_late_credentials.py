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
print(open_dir("gs://bucket/root")._fs.credentials.credentials.token)
""",
    "a daemon": """
import asyncio, time
from pannier.storage.gcs.http import shared_connection
from pannier.storage.upload_threads import UploadThreads

async def main():
    connection = shared_connection({}, UploadThreads(1))
    opened = await connection.get(time.monotonic() + 20)
    print(opened._fs.credentials.credentials.token)
    await connection.release()

asyncio.run(main())
""",
}


@pytest.mark.parametrize("who", LATE)
def test_credentials_of_a_late_metadata_server_are_waited_for_by(who: str) -> None:
    with late_metadata_server(refused=12) as environment:
        done = subprocess.run(
            [sys.executable, "-c", LATE[who]],
            env=clean_environment(environment),
            capture_output=True,
            text=True,
            timeout=2 * BOUND_S,
        )
    assert done.stdout.strip() == "secret", done
