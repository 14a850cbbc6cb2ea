"""A plan: its parts as data, its file, its cache, the placement of its arguments."""
