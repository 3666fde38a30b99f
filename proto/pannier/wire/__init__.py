"""What client and services share: the meaning of the messages in ``pannier.v1``.

Only :mod:`pannier.wire.plan_codec` imports torch; the sidecar doesn't use it.
"""

import os

# Read when gRPC is imported, as it is by modules of this package. Unset, it is off for gRPC's Python package, but on
# for its core, which prints a line at each fork: for each shell command of a notebook, and each DataLoader.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
