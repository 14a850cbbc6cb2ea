"""Machine, cost and search."""
