"""Explanations of a plan: its decisions as tables, and what each costs beside its alternatives."""
