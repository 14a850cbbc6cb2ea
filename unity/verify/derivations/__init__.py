"""Canonical forms of programs, and derivations replayed on them."""
