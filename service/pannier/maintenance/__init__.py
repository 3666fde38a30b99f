"""Operations on checkpoints after their commit, or instead of it: all without torch."""
