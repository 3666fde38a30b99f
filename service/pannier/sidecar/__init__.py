"""The per-host daemon: takes data files from trainers, carries them to storage, reports.

It moves bytes and never imports torch. Blocking code runs in the gRPC server's
threads (``service``, ``sessions``, ``spool``, ``files``), asynchronous code on
one event loop in a thread of its own (``link``, ``uploads``, ``slots``); both
meet in ``saves``, which is thread-safe.
"""
