"""Proofs of rules and of the operator table."""
