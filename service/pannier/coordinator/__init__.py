"""The coordinator: one per job. It makes the global plan and commits the checkpoint.

Data flows one way: local plans -> :mod:`gather` -> :mod:`planning` -> :mod:`manifest`
-> receipts -> :mod:`commit`. It keeps nothing on disk; what it must not forget is in the
bucket.
"""

import os

# By itself numpy asks for huge pages for columns of 4 MiB and more, as a large job's are. They are
# let go of again at once; where memory is in pieces, the kernel takes longer to put such pages
# together than planning takes in all. Read when numpy is imported, which is after this.
os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")
