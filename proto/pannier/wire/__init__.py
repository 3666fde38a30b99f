"""What client and services share: the meaning of the messages in ``pannier.v1``.

Only :mod:`pannier.wire.plans` imports torch; the sidecar doesn't use it.
"""
