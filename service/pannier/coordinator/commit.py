"""The bytes of ``.metadata``: what of a commit needs torch.

In: complete metadata as a message. Out: the pickle that torch's readers take. How these bytes
become the checkpoint is :mod:`pannier.records`' business.
"""

import pickle

from torch.distributed.checkpoint.metadata import StorageMeta

from pannier.v1 import plan_pb2
from pannier.wire.plans import build_metadata


def pickle_metadata(message: plan_pb2.GlobalMetadata, *, checkpoint_id: str, attempt: str) -> bytes:
    """Bytes of ``.metadata`` as torch's readers take them. CPU-bound; any thread."""
    storage_meta = StorageMeta(checkpoint_id=checkpoint_id, save_id=attempt)
    # The protocol that torch's own writer uses, so that its readers of all versions know it.
    return pickle.dumps(build_metadata(message, storage_meta=storage_meta), protocol=4)
