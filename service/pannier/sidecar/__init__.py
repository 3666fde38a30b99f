"""The daemon of a host: takes data files from trainers, uploads them to storage, reports to the coordinator.

It moves bytes and never imports torch. Blocking code runs in the gRPC server's threads (``rpc``,
``ingest``, ``spool``), asynchronous code on one event loop in a thread of its own
(``coordinator_client``, ``coordinator_stream``, ``upload``). Both change saves through the thread-safe
``save_registry``.
"""
