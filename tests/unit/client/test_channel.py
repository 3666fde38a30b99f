"""The client's channel to its sidecar: an impostor's socket is refused."""

import os
import socket
from pathlib import Path

import pytest

from pannier.client.transport.channel import SidecarChannel
from pannier.wire.errors import ConfigurationError
from support.network.other_user import needs_root


@needs_root
def test_a_client_refuses_a_socket_of_another_user(sockets: Path) -> None:
    path = sockets / "d.sock"
    with socket.socket(socket.AF_UNIX) as impostor:
        impostor.bind(str(path))
        impostor.listen()
        os.chown(path, 4711, 4711)
        for line in (
            SidecarChannel(f"unix://{path}", trusted_uids={os.geteuid(), 0}),
            SidecarChannel(f"unix://{path}", trusted_uids={os.geteuid(), 4712}),
        ):
            with (
                pytest.raises(ConfigurationError, match=r"belongs to user 4711.*PANNIER_ALLOW_UID"),
                line.call(lambda channel: pytest.fail("called")),
            ):
                pass
            with pytest.raises(ConfigurationError, match="belongs to user 4711"):
                line.renew()
        impostor.setblocking(False)
        with pytest.raises(BlockingIOError):
            impostor.accept()
        trusting = SidecarChannel(f"unix://{path}", trusted_uids={os.geteuid(), 0, 4711})
        trusting.renew()


def test_an_unreachable_path_is_not_an_impostors(sockets: Path) -> None:
    SidecarChannel(f"unix://{sockets}/none.sock", trusted_uids={os.geteuid(), 0}).renew()
