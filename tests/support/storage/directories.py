"""What lies in a directory, also while others write and delete there."""

import os
from pathlib import Path


def files_below(directory: Path) -> set[str]:
    """The files in it, at every depth, relative to it; a directory that vanishes meanwhile has none."""
    return {
        os.path.relpath(os.path.join(top, name), directory)
        for top, _, names in os.walk(directory)
        for name in names
    }
