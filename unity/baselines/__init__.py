"""What others published, on this project's costs: algorithms, and strategies that people choose by hand.

Each is a function of one name in a module of its own, from a search and what is asked of it to a strategy.
"""
