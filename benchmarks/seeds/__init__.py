"""All published systems on all the papers' models and machines, with this project's costs: `python -m benchmarks.seeds`."""
