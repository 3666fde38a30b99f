"""Options of a gRPC channel with a connection of its own, as a process has it."""

from typing import Final

from pannier.wire.addresses import ChannelOptions, channel_options

OWN_CONNECTION: Final[ChannelOptions] = [
    *channel_options(),
    ("grpc.use_local_subchannel_pool", 1),
]
"""gRPC shares connections to one address: without it a call might go to the process that was there before."""
