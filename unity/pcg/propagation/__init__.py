"""Parallel types followed through a program: the factor solver, loops, derivative rules, choices."""
