"""What client and services share: the meaning of the messages in ``pannier.v1``.

Only :mod:`pannier.wire.plan_codec` imports torch; daemons do without it.
"""
