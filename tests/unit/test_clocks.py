"""What the chaos test calls a wrong clock is wrong where the product asks for the time."""

import os
import subprocess
import sys
import time

import pytest

from support.processes import clocks

ASK = """
import time, datetime
before = time.monotonic()
print(time.time(), time.time_ns(), datetime.datetime.now().timestamp(), before)
assert isinstance(datetime.datetime.fromisoformat("2026-01-01T00:00:00+00:00"), datetime.datetime)
"""


@pytest.mark.parametrize("seconds", [3600.0, -3600.0, 0.0])
def test_a_process_has_another_time_and_the_same_monotonic_clock(seconds: float) -> None:
    began, monotonic = time.time(), time.monotonic()
    environment = {**os.environ, **clocks.environment(seconds)}
    answer = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, check=True, capture_output=True, text=True
    ).stdout.split()
    ended = time.time()
    for seen in (float(answer[0]), float(answer[1]) / 1e9, float(answer[2])):
        assert began + seconds - 0.1 <= seen <= ended + seconds + 0.1
    assert float(answer[3]) >= monotonic
