"""Published searches, and strategies that people choose by hand, all on this project's costs, for comparison.

Each is a function from a search and a request (`unity.search.published`) to a strategy. The product imports none of them: it loads
one by its name.
"""
