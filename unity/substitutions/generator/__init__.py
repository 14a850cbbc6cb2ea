"""Finds rules: enumerates graphs, pairs those that compute the same, and keeps what is proved and not yet known."""
