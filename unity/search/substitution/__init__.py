"""Parallelization by substitution alone, as Unity published it (sections 4 and 5), for comparison with the exact search."""
