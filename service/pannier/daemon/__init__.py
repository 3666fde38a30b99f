"""What both daemons share: settings, listeners, errors, status, health, metrics, logs and signals.

Where synchronous and asyncio servers differ, ``Aio`` in a name marks the asyncio one.
"""
