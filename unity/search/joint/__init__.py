"""Joint search of algebraic rewritings and parallelizations: segments, backtracking, prices of programs."""
