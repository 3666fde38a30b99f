"""Messages that come and go use the same pages again."""

import subprocess
import sys

import pytest

ALLOCATES = """
import resource, threading
from pannier.daemon.malloc import keep_freed_memory

keep_freed_memory()


def messages(count):
    # Some at a time, as of a stream.
    for _ in range(count):
        some = [bytes([n]) * (1 << 20) for n in range(4)]
        del some


def faults(count):
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    threads = [threading.Thread(target=messages, args=(count,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun


faults(10)
print(faults(100))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_messages_are_not_given_back_to_the_system() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATES], check=True, capture_output=True, text=True
    )
    pages_of_all = 3 * 100 * 4 * 256
    assert int(done.stdout) < pages_of_all / 10
