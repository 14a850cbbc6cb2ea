"""The operations that programs are made of: JAX's public functions, as templates and as small functions that draw a step.

Each module enters its operations into the `table`, in the order of these imports: a seed draws from them in this order.
"""

# isort: off
from benchmarks.fuzz.operations import elementwise as elementwise
from benchmarks.fuzz.operations import reductions as reductions
from benchmarks.fuzz.operations import shapes as shapes
from benchmarks.fuzz.operations import products as products
from benchmarks.fuzz.operations import indexing as indexing
from benchmarks.fuzz.operations import random_numbers as random_numbers
from benchmarks.fuzz.operations import layers as layers
from benchmarks.fuzz.operations import control_flow as control_flow
from benchmarks.fuzz.operations import models as models
