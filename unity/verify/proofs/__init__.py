"""Proofs of rules and of the operator table: first-order, on symbols, and by execution."""
