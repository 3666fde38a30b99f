"""Versions that both ends of a connection compare."""

from importlib.metadata import PackageNotFoundError, version

WIRE_VERSION = 7
"""Changes whenever an older peer could misunderstand a message."""


def package_version() -> str:
    """Version of the installed distribution, ``0+unknown`` in a bare checkout."""
    try:
        return version("pannier")
    except PackageNotFoundError:
        return "0+unknown"
