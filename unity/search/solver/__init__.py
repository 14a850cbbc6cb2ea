"""Exact optimization over discrete variables with costs on variables and on pairs of them. The package knows no graph.

- `problem`: problems and their solutions; `domains`: arc consistency.
- `elimination_order` and `elimination`: exact variable elimination, whose inner loop is `minplus`.
- `core`, `bounds` and `single_objective`: reduction and lower bounds for problems that elimination alone cannot solve.
- `minimizer`: the minimum of time + weight * memory for any number of weights.
- `frontier`, `pareto`, `min_marginals` and `local_search`: the trade-off between time and memory; `lagrangian`: its bound.
"""
