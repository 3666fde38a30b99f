"""A sidecar that does what a test says."""

import shutil
from collections.abc import Iterator

import pytest

from support.actors.scripted_sidecar import ScriptedSidecar
from support.processes.daemons import short_directory


@pytest.fixture
def sidecar() -> Iterator[ScriptedSidecar]:
    directory = short_directory()
    with ScriptedSidecar(directory) as scripted:
        yield scripted
    shutil.rmtree(directory)
