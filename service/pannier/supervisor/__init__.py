"""Supervisors, which keep daemons running: ``pannier up`` (:mod:`.up`), and what all of them share."""
