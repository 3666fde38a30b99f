"""The saves of this process: each from its call to its end, and the staging memory that they share."""
