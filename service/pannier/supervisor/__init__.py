"""Processes that keep daemons running: of one user (:mod:`.up`), and the parts of any supervisor."""
