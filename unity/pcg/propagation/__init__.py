"""Parallel types followed through a program: the factor solver, nested programs, choices."""
