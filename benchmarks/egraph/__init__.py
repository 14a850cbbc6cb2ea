"""Equality saturation with the library's rules, by egglog, for comparison with the backtracking search."""
