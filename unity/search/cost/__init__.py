"""Prices of operators, of changes of type and of whole graphs, and the optimization problem that they form."""
