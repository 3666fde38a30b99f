"""What client and services share: the meaning of the messages in ``pannier.v1``.

No module here does I/O. Only :mod:`pannier.wire.plans` and
:mod:`pannier.wire.archives` import torch; the sidecar uses neither.
"""
