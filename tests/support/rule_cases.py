"""Random well-typed terms, for property tests."""

import random

from hypothesis import strategies as st

from unity.base.errors import IllTypedError
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, partitioned
from unity.substitutions.language.term import Apply, Term, Variable
from unity.substitutions.language.typecheck import TensorType, result_types, tensor
from unity.substitutions.language.vocabulary import VOCABULARY

A = Axis("a", 2, 0)
STATES = (UNUSED, partitioned(0), partitioned(1), PARTIAL, REPLICATED)
ATTRIBUTES = {"dim": (-1, -2, -3), "axis": ("a",), "size": (1, 2)}
ATTRIBUTES |= {"groups": (1, 2), "padding": ("same", "valid"), "function": ("relu", "tanh", "f")}


@st.composite
def typed_terms(draw, axes=(A,), operators=4, skip=frozenset({"embedding", "minus_one"})):
    """A term of a few operators with the types of its variables."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    names = [n for n in VOCABULARY if n not in skip]
    known: dict[str, TensorType] = {}
    pool: list[tuple[Term, TensorType]] = []
    for name, shape in zip("xyzw", [(4, 4), (4, 4), (4,), ()], strict=True):
        states = STATES if len(shape) == 2 else (UNUSED, REPLICATED, PARTIAL)
        known[name] = tensor(shape, [rng.choice(states) for _ in axes])
        pool.append((Variable(name), known[name]))
    for _ in range(200):
        operator = VOCABULARY[rng.choice(names)]
        attributes = tuple(rng.choice(ATTRIBUTES[kind]) for kind in operator.attributes)
        operands = [rng.choice(pool) for _ in range(operator.operands)]
        try:
            types = result_types(operator.name, attributes, tuple(t for _, t in operands), axes)
        except IllTypedError:
            continue
        result = rng.randrange(operator.results)
        pool.append((Apply(operator.name, attributes, tuple(x for x, _ in operands), result), types[result]))
        if len(pool) >= 4 + operators:
            break
    term = pool[-1][0]
    return term, known


VALUES = {
    "dim": st.integers(-4, -1) | st.just("d"),
    "axis": st.sampled_from(["a", "b"]),
    "size": st.integers(0, 9) | st.just("k"),
    "groups": st.integers(0, 9) | st.just("g"),
    "padding": st.sampled_from(["same", "valid", "p"]),
    "function": st.sampled_from(["relu", "tanh", "f"]),
}


@st.composite
def plain_terms(draw, depth=4):
    """Any term, well-typed or not."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return Variable(draw(st.sampled_from(["x", "y", "long_name", "z2"])))
    operator = VOCABULARY[draw(st.sampled_from(sorted(VOCABULARY)))]
    attributes = tuple(draw(VALUES[kind]) for kind in operator.attributes)
    operands = tuple(draw(plain_terms(depth=depth - 1)) for _ in range(operator.operands))
    return Apply(operator.name, attributes, operands, draw(st.integers(0, operator.results - 1)))
