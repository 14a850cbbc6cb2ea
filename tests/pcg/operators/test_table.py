"""The operator table is right: every entry, every choice, on one axis and on two, against the operator on whole tensors.

Values, gradients (in their dual types) and collectives: a body's only communication is the Reduces that its choice declares.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import CI, in_turn
from jax import lax
from jax.experimental import sparse
from operator_cases import CASES, KINDS, UNKNOWN
from parallel_cases import Application

from unity.pcg.capture.capture import capture
from unity.pcg.ir.program import Body, close, tensor_type
from unity.pcg.jaxprs.jaxprs import LINEAR_SOLVE
from unity.pcg.operators.table import TABLE
from unity.pcg.operators.table.elementwise import elementwise, every_dimension
from unity.pcg.operators.table.reduction import reduction
from unity.pcg.operators.table.windows import windowed
from unity.pcg.propagation.choices import choices
from unity.pcg.propagation.nested import linear_solves as linear
from unity.pcg.propagation.nested.programs import nested_body
from unity.pcg.propagation.solver import NESTED
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.factors import Entry, Factor, Halo, Slot, Spec
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED


@pytest.fixture(autouse=True)
def exact():
    with jax.enable_x64(True):
        yield


def application(name, sizes=(2, 3)):
    fn, args = CASES[name]
    return Application(fn, [a() if callable(a) else a for a in args], sizes)


def equations(body: Body):
    for e in body.equations:
        yield body, e
        if e.name == LINEAR_SOLVE:
            inside = [linear.solve_program(e, name) for name in linear.program_names(e)]
        else:
            inside = [nested_body(e)] if e.name in NESTED and e.name not in ("cond", "while") else []
        for inner in inside:
            yield from equations(inner)


def nesting(name):
    """Return a new function, which JAX has not traced before, with a program inside of another."""

    def shifted(x):
        return jnp.sin(x) + 1

    def step(h, w):
        return shifted(h @ w), None

    return {
        "scan": lambda w, x: lax.scan(step, x, w)[0].mean(),
        "cond": lambda w, x: lax.cond(x[0, 0] > 0, shifted, jnp.sin, x @ w[0]).mean(),
        "while": lambda w, x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, shifted(c[1])), (0, x @ w[0]))[1].mean(),
        "fori_loop": lambda w, x: lax.fori_loop(0, 3, lambda k, h: shifted(h), x @ w[0]).mean(),
        "checkpoint": lambda w, x: jax.checkpoint(shifted)(x @ w[0]).mean(),
        "jit": lambda w, x: jax.jit(shifted)(x @ w[0]).mean(),
    }[name]


@pytest.mark.parametrize("name", ["scan", "cond", "while", "fori_loop", "checkpoint", "jit"])
def test_programs_inside_follow_the_entries_that_there_are_when_a_function_is_captured(name, monkeypatch):
    def offers(fn):
        graph = capture(fn, *(jax.ShapeDtypeStruct(shape, "float32") for shape in ((4, 32, 32), (64, 32)))).graph
        return [[c.states for c in choices(node.body)] for node, _ in graph.walk() if node.body is not None]

    fn = nesting(name)
    with monkeypatch.context() as changed:
        changed.delitem(TABLE, "sin")
        before = offers(fn)
    assert offers(fn) == offers(nesting(name)) != before


# They take seconds to compile, others say the same, and `test_operator_proofs` proves them.
AGAIN = {
    *("dot product attention", "conv, other dimension numbers", "random, vmapped raw keys"),
    *("gradient of igamma", "polygamma", "regularized_incomplete_beta"),
}


# CI runs one case of each kind, on one version of JAX: variants follow from the table, and `test_operator_proofs` proves all.
RUN = KINDS if CI or jax.__version_info__ < (0, 12) else CASES


@pytest.mark.parametrize("name", in_turn([name for name in RUN if name not in AGAIN]))
def test_every_choice_computes_what_the_operator_does(name):
    application(name).check()


@pytest.mark.parametrize(
    "name", ["conv, groups, many channels in each", "layer norm", "embedding", "dropout", "scan", "custom_vjp", "function of a sum"]
)
def test_on_three_axes_too(name):
    application(name, (2, 2, 2)).check()


def test_every_entry_is_exercised():
    seen = set()
    for fn, args in CASES.values():
        jaxpr = jax.make_jaxpr(fn)(*(a() if callable(a) else a for a in args))
        seen |= {e.name for _, e in equations(close(jaxpr))}
    newer, older = {"frexp", "ldexp", "log2", "one_minus_square", "polynomial"}, {"le_to", "lt_to"}  # what JAX makes by version
    other = newer if jax.__version_info__ < (0, 12) else older
    assert set(TABLE) - other - {"kernel"} <= seen  # each kernel is another: test_kernels.py


def test_every_factor_of_an_operator_is_a_choice():
    for name in CASES:
        body = application(name).body
        (*rest, e) = body.equations
        if rest or e.name not in TABLE or e.operands != body.inputs:
            continue
        found = [(c.operands, c.results) for c in choices(body)]
        spec = spec_of(body, e)
        assert spec is not None
        for factor in spec.factors:
            assert factor.reduction not in ("", "sum") or factor.states() in found, (name, factor)


def test_every_choice_splits_dimensions_that_are_there():
    for name in CASES:
        body = application(name).body
        shapes = [body.tensor(a).shape for a in (*body.inputs, *body.outputs)]
        for c in choices(body):
            assert all(s.kind != "P" or s.dim < len(shape) for s, shape in zip(c.states, shapes, strict=True)), (name, c)


@pytest.mark.parametrize("name", UNKNOWN)
def test_operators_without_an_entry_run_replicated(name):
    body = application(name).body
    assert {s for c in choices(body) for s in c.states} <= {UNUSED, REPLICATED}


def test_primitives_of_which_jax_may_not_know_that_results_differ_are_the_same_everywhere():
    matrix = sparse.BCOO.fromdense(jnp.eye(4) + jnp.eye(4, k=1))
    body = close(jax.make_jaxpr(lambda x: matrix @ x)(np.ones((4, 6))))
    assert {s for c in choices(body) for s in c.states} == {UNUSED}


def test_operators_that_cannot_vary_are_unused():
    assert [c.name for c in choices(application("regularized_incomplete_beta").body)] == ["unused"]


def test_booleans_have_no_partial_sums():
    for name in ("select_n of bools", "any and all", "embedding of bools"):
        assert all(PARTIAL not in c.states for c in choices(application(name).body))


# A wrong table is found out


def parallel_contraction(params, operands, results):
    spec = TABLE_BEFORE["dot_general"].spec(params, operands, results)
    return Spec(tuple(Factor(f.name, f.size, f.operands, f.results) for f in spec.factors))


def unblocked(params, operands, results):
    return Spec(every_dimension([operands[0].shape], results[0].shape))


def plain_bits(operands, layout):
    return layout.bind(*operands, shape=layout.results[0].local_shape[layout.operands[0].ndim :])


def plain_rows(operands, layout):
    sizes = zip(layout.params["slice_sizes"], layout.operands[0].local_shape, layout.operands[0].shape, strict=True)
    return layout.bind(*operands, slice_sizes=tuple(m if n == whole else n for n, m, whole in sizes))


def swapped_digits(params, operands, results):
    """Return a wrong entry that takes the second digit for the first."""
    spec = TABLE_BEFORE["reshape"].spec(params, operands, results)
    (first, *rest) = spec.factors
    return Spec((Factor(first.name, first.size, first.operands, (Slot(1),)), *rest))


def shifted(params, operands, results):
    """Return a wrong entry whose halos have one index more before, and one less after."""
    spec = TABLE_BEFORE["conv_general_dilated"].spec(params, operands, results)
    moved = (f.halo and Halo(f.halo.before + 1, f.halo.after - 1) for f in spec.factors)
    return replace(spec, factors=tuple(replace(f, halo=h) for f, h in zip(spec.factors, moved, strict=True)))


def isolated(params, operands, results):
    """Return a wrong entry without halos."""
    spec = TABLE_BEFORE["conv_general_dilated"].spec(params, operands, results)
    return replace(spec, factors=tuple(replace(f, halo=None) for f in spec.factors))


TABLE_BEFORE = dict(TABLE)
MUTATIONS = {
    "a sine is linear": ("sin", "sin", elementwise(linear=((0,),)), None),
    "a sum is linear in each of its terms": ("add", "add", elementwise(linear=((0,), (1,))), None),
    "a product is linear in both factors together": ("mul", "mul", elementwise(linear=((0, 1),)), None),
    "integers are divided linearly": ("div of integers", "div", elementwise(linear=((0,),)), None),
    "partial maxima are added": ("max over one dimension", "reduce_max", reduction("sum"), None),
    "a contracted dimension is parallel": ("dot_general", "dot_general", parallel_contraction, None),
    "a running sum may be cut": ("cumsum", "cumsum", unblocked, None),
    "a reversed dimension may be cut": ("rev", "rev", unblocked, None),
    "sorting may be cut": ("sort", "sort", unblocked, None),
    "every device draws its own random numbers": ("random bits", "random_bits", None, plain_bits),
    "every device has all rows": ("embedding, clipped", "gather", None, plain_rows),
    "groups are not counted again": (
        "conv, groups",
        "conv_general_dilated",
        None,
        lambda operands, layout: layout.bind(*operands),
    ),
    "a reshape loses its digits": ("reshape, [2, 12] to [6, 4]", "reshape", swapped_digits, None),
    "windows are a little off": ("conv, stride two", "conv_general_dilated", shifted, None),
    "windows end where slices do": ("conv, both spatial dimensions", "conv_general_dilated", isolated, None),
    "zeros are around what maxima are taken of": ("max pooling of negative numbers", "reduce_window_max", windowed("sum"), None),
    "every slice is padded": (
        "average pooling, both dimensions",
        "reduce_window_sum",
        None,
        lambda operands, layout: layout.bind(*operands),
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_entry_is_noticed(mutation, monkeypatch):
    case, name, spec, local = MUTATIONS[mutation]
    entry = TABLE[name]
    monkeypatch.setitem(TABLE, name, Entry(name, spec or entry.spec, local or entry.local))
    monkeypatch.setattr("parallel_cases.MOST", 6)  # as many combinations as by hand
    with pytest.raises((AssertionError, ValueError, TypeError)):
        application(case).check()


def test_a_forgotten_all_reduce_is_noticed(monkeypatch):
    from unity.pcg.local import interpreter as walker

    monkeypatch.setattr(walker, "REDUCERS", {**walker.REDUCERS, "sum": lambda x, names: jax.lax.pmax(x, names)})
    with pytest.raises((AssertionError, NotImplementedError)):
        application("softmax").check()


def test_a_random_word_costs_the_same_however_it_is_drawn() -> None:
    words = tensor_type((96,), np.dtype(np.uint32))
    drawn = TABLE["random_bits"].spec({}, [tensor_type((), words.dtype)], [words])
    hashed = TABLE["threefry2x32"].spec({}, [words] * 4, [words] * 2)
    assert drawn.flops == hashed.flops > words.shape[0]
