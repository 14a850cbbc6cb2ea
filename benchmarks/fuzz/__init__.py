"""A fuzzer: random programs, random plans of each, and a verdict on values, gradients and crashes.

`python -m benchmarks.fuzz --help` lists the options. `programs` draws programs as data, by the table in `operations`; `data` draws
their arguments, `plans` their parallel graphs; `verdict` compares, `noise` bounds rounding errors, `minimize` shortens what failed.
"""
