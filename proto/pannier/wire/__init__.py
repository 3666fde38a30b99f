"""What both ends of a connection must agree on besides the messages of ``pannier.v1``: names, codecs, errors, limits.

Only :mod:`pannier.wire.plan_codec` imports torch; the sidecar never imports that module.
"""
