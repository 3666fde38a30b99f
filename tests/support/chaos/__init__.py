"""Everything that can go wrong does, at random: ``python -m support.chaos.run``."""
