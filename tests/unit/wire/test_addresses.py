"""Addresses that daemons can listen on."""

import shutil

import grpc
import pytest

from pannier.wire.addresses import parse_address
from pannier.wire.errors import ConfigurationError
from support.processes.daemons import short_directory


def test_every_socket_path_that_is_accepted_can_be_bound() -> None:
    directory = short_directory()
    try:
        longest = f"unix://{directory}/{'s' * (105 - len(str(directory)) - 1)}"
        server = grpc.server(None)
        assert server.add_insecure_port(parse_address(longest, setting="--address"))
        server.stop(None)
        with pytest.raises(ConfigurationError, match="at most 105 bytes, this one has 106"):
            parse_address(f"{longest}s", setting="--address")
    finally:
        shutil.rmtree(directory)
