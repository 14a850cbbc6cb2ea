"""Pipelines of stages of different operators: the chain of a program, its cuts, and the stages' program and operator."""
