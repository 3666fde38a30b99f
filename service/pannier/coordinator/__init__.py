"""The coordinator: one per job. It makes the global plan and commits the checkpoint.

Data flows one way: local plans -> :mod:`planning` -> manifest -> receipts -> :mod:`commit`; the
states of each save and its task are in :mod:`saves`. It keeps nothing on disk; all that a restart needs is
in the bucket.
"""

import os

# By default numpy asks for huge pages for columns of 4 MiB and more, as a large job has. They are freed
# again at once; where memory is fragmented, the kernel takes longer to find such pages than planning
# takes in all. Read when numpy is imported, which is after this.
os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")
