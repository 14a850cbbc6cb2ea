"""The commands of `unity`, a module each: `HELP` is its help line, `add_arguments` describes it, `run` returns its exit status."""
