"""The coordinator: one per job. It makes the global plan and commits the checkpoint.

Data flows one way: local plans -> :mod:`planning` -> manifest -> receipts -> :mod:`commit`; the
states of each save and its task are in :mod:`saves`. It keeps nothing on disk; all that a restart needs is
in the bucket.
"""

import os

# By default numpy requests huge pages for arrays of 4 MiB and more, such as the columns of a large job.
# These arrays are short-lived; where memory is fragmented, the kernel takes longer to find huge pages than
# all of planning takes. numpy reads the variable when it is imported, which is after this.
os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")
