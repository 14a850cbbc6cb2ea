"""Parallel graphs: changes of type, type checking, pipelines and branches as operators, traffic."""
