"""What the bucket says of checkpoints, and how an attempt ends: all without torch.

One attempt's objects, in the order in which they come to be: :mod:`manifests`,
:mod:`receipts`, :mod:`decisions` (the candidate of ``.metadata`` before it), ``.metadata``
itself (:mod:`installing`); :mod:`removing` takes them away again. :mod:`listing` and
:mod:`verifying` judge what is there. The coordinator and the command line share it: whoever
runs a step, and however often, the outcome is the same.
"""
