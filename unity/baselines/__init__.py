"""Published searches and strategies that people choose by hand, all on this project's costs, for comparison.

Each takes a search and a request (`unity.search.published`) and returns a strategy. The product imports none of them: it finds one
by its name.
"""
