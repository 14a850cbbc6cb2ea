"""`python -m benchmarks.fuzz`: see `benchmarks.fuzz.run`."""

from benchmarks.fuzz.run import main

main()
