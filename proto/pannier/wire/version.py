"""Versions that both ends of a connection compare."""

from importlib.metadata import PackageNotFoundError, version

WIRE_VERSION = 7
"""Changes whenever an older peer could misunderstand a message."""
ONE_VERSION = (
    "run the same version of Pannier in the trainers, the sidecars and the coordinator of a job "
    '(docs/operations.md, "Upgrade and rollback")'
)
"""The remedy, for errors."""


def package_version() -> str:
    """Version of the installed distribution, ``0+unknown`` in a bare checkout."""
    try:
        return version("pannier")
    except PackageNotFoundError:
        return "0+unknown"
