"""Canonical forms of programs, and the replay of derivations and parallelizations on them."""
