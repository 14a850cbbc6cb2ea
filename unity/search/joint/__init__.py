"""Algebra and parallelization searched together: segments, backtracking, prices of programs."""
