"""Directories for one user alone, whatever the umask of who started the daemon.

In: paths. Out: directories of mode 0700. Blocking.
"""

from pathlib import Path


def make_private(directory: Path) -> None:
    """Makes the directory with mode 0700 unless it exists; its parents with 0755 at most.

    One that exists stays as it is: whoever uses it checks it. Raises OSError.
    """
    missing = [each for each in directory.parents if not each.exists()]
    for parent in reversed(missing):
        # Not Path's own "parents", which would open them to everybody under a umask of 0.
        parent.mkdir(mode=0o755, exist_ok=True)
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        return
    # A umask may have taken away what its owner needs.
    directory.chmod(0o700)
