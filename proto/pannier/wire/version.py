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


def check_wire_version(peer: str, theirs: int, here: str) -> None:
    """Raises VersionMismatchError unless a peer has this wire version.

    Args:
        peer, here: both ends, as an error names them.
    """
    if theirs != WIRE_VERSION:
        # It imports gRPC, which `pannier --version` doesn't need.
        from pannier.wire.errors import VersionMismatchError

        raise VersionMismatchError(
            f"{peer} speaks wire version {theirs}, {here} (pannier {package_version()}) speaks "
            f"{WIRE_VERSION}: {ONE_VERSION}"
        )
