"""The coordinator: one per job. It makes the global plan and commits the checkpoint.

Data flows one way: local plans -> :mod:`gather` -> :mod:`planning` -> :mod:`manifest`
-> receipts -> :mod:`commit`. It keeps nothing on disk; what it must not forget is in the
bucket.
"""
