"""Work of a coordinator after a commit, on which no save waits."""
