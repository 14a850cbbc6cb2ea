"""Several processes run one program: which devices are where, what all agree on, and arrays of which each has a part."""
