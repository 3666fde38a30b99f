"""The daemon of a host: takes data files from trainers, uploads them to storage, reports to the coordinator.

It moves bytes and never imports torch. One event loop, in the main thread, owns all state; calls of the
file system that may block run in threads (:mod:`pannier.storage.io_threads`), so that a disk that doesn't
answer stops neither heartbeats nor status.
"""
