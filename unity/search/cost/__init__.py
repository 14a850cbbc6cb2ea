"""Prices: operators, changes of type, whole graphs, and the optimization problem made of them."""
