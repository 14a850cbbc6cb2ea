"""Parallel types followed into nested programs: calls, derivative rules, conditionals, loops, linear solves."""
