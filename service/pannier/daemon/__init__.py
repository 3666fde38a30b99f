"""What both daemons share: how they listen, stop, log, fail and tell operators how they are.

Each piece comes for a synchronous gRPC server and, with ``aio`` in its name,
for one on an event loop.
"""
