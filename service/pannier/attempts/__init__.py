"""The objects of one attempt in storage, and how an attempt ends: all without torch.

In the order in which they are written: :mod:`manifests`, :mod:`receipts`, :mod:`decisions` (after the
candidate of ``.metadata``), the copies of :mod:`extra_files`, ``.metadata`` itself (:mod:`metadata_swap`);
:mod:`delete_attempt` removes them. The coordinator and the command line share these steps, all of them
idempotent.
"""
