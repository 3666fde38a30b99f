"""The objects of one attempt in storage, and how an attempt ends: all without torch.

In the order in which they come to be: :mod:`manifests`, :mod:`receipts`, :mod:`decisions` (the
candidate of ``.metadata`` before it), ``.metadata`` itself (:mod:`metadata_swap`);
:mod:`delete_attempt` takes them away again. The coordinator and the command line share them: whoever
runs a step, and however often, the outcome is the same.
"""
