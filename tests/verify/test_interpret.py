"""The interpreter computes what JAX computes: whole programs, collectives on real devices, batches; and domains keep their laws."""

from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec as P
from operator_cases import CASES
from parallel_cases import is_key
from pieces import mesh_of

from unity.pcg.ir.program import close
from unity.pcg.operators.table import TABLE
from unity.pcg.types.axis import Axis
from unity.verify.semantics.domains import Modular, Plain
from unity.verify.semantics.interpret import NotInterpreted, interpret, interpret_values
from unity.verify.semantics.polynomial_equality import compare
from unity.verify.semantics.primitives import MEANINGS, StackedValue
from unity.verify.semantics.symbolic import Symbolic

PRIME = 2**31 - 1


@pytest.fixture(autouse=True)
def exact():
    with jax.enable_x64(True):
        yield


def traced(fn, *args):
    return jax.make_jaxpr(lambda *a: jax.tree.leaves(fn(*a)))(*args)


def plain_cases():
    for name, (fn, args) in CASES.items():
        if not any(callable(a) for a in args):
            yield name, fn, args


# Whole programs


def test_every_entry_of_the_table_has_a_meaning():
    assert set(TABLE) - {"kernel"} <= set(MEANINGS)  # what kernels compute their authors know


def test_values_agree_with_jax():
    """Over numpy's numbers, for every program whose functions numpy has."""
    done, missing = {}, []
    for name, fn, args in plain_cases():
        args = [jnp.asarray(a) for a in args]
        program = traced(fn, *args)
        try:
            with np.errstate(all="ignore"):
                done[name] = fn, args, program, interpret(program, args_of(args), Plain(), ())
        except NotInterpreted:
            missing.append(name)
    assert len(done) > 220, missing
    every = together([(fn, args) for fn, args, *_ in done.values()])
    for (name, (*_, program, found)), wanted in zip(done.items(), every, strict=True):
        near = precision(program)
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_allclose(x.astype(complex), np.asarray(y).astype(complex), near, near, err_msg=name)


def together(cases):
    """Return the results of functions, from one program with little optimization: most of the time goes to compiling."""

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(every):
        return [jax.tree.leaves(fn(*args)) for (fn, _), args in zip(cases, every, strict=True)]

    return run([args for _, args in cases])


def precision(program):
    """Return a bound on relative errors, by the narrowest dtype in a program: the interpreter does not round."""
    types = {t.dtype for t in close(program).tensors.values() if t.floating}
    bits = [e.params["mantissa_bits"] for e in close(program).equations if e.name == "reduce_precision"]
    eps = max([2.2e-16, *(float(jnp.finfo(t).eps) for t in types), *(2.0**-b for b in bits)])
    return (300 if eps < 1e-10 else 8) * eps


def args_of(args):
    return [Plain().constant(a) if np.asarray(a).dtype.kind in "fcV" else np.asarray(a) for a in args]


INTEGRAL = (
    "add",
    "sub",
    "mul",
    "neg",
    "integer_pow",
    "square",
    "max",
    "min",
    "clamp",
    "dot_general",
    "dot_general, batch in other places",
    "dot_general, none contracted",
    "conv, dilation",
    "conv, transposed",
    "conv, groups",
    "conv, batch groups",
    "conv, other dimension numbers",
    "conv, 3-D",
    "conv, patches",
    "prod over one dimension",
    "max over one dimension",
    "cumsum",
    "cumprod",
    "cummax",
    "cumsum, reversed",
    "max pooling",
    "min pooling",
    "pooling, dilated",
    "pooling, base dilated",
    "pooling, own function",
    "pad, value operand",
    "pad, negative",
    "concatenate, unequal",
    "gather of windows",
    "roll",
    "embedding, filled with ones",
    "take_along_axis",
    "scatter-add, out of bounds",
    "scatter, columns",
    "scatter-mul",
    "scatter-min",
    "windows",
    "dynamic_update_slice",
    "scan, sums",
    "cond",
    "relu",
    "select_n of three",
    "tile of both",
    "rev",
    "reduce, own function",
    "same value twice",
    "outer product by broadcasting",
)


@pytest.mark.parametrize("name", INTEGRAL)
def test_residues_agree_with_integer_arithmetic(name):
    """With small integers as elements, float64 is exact."""
    fn, args = CASES[name]
    rng = np.random.default_rng(1)
    args = [rng.integers(-4, 5, np.shape(a)).astype(np.float64) if np.asarray(a).dtype.kind == "f" else np.asarray(a) for a in args]
    domain = Modular()
    given = [domain.constant(a) if a.dtype.kind == "f" else a for a in args]
    program, wanted = traced(fn, *args), jax.tree.leaves(fn(*map(jnp.asarray, args)))
    for x, y in zip(interpret(program, given, domain, ()), wanted, strict=True):
        np.testing.assert_array_equal(x, domain.constant(np.asarray(y)))


def test_candidates_of_a_batch_are_independent():
    def fn(x, w, i):
        y = jnp.exp(x @ w) + lax.conv_general_dilated(x[None, None], w[None, None, :2, :2], (1, 1), "SAME")[0, 0]
        return y[i] / jnp.maximum(y.sum(1), 0), lax.sort(y, dimension=0), jnp.cumsum(y, 1).reshape(2, 8)

    rng, domain = np.random.default_rng(2), Modular()
    x, w = (rng.integers(0, PRIME, (5, 3, 4, 4)) for _ in range(2))
    i = rng.integers(0, 4, (5, 1, 4))
    program = traced(fn, np.zeros((4, 4)), np.zeros((4, 4)), np.zeros(4, np.int64))
    together = interpret(program, [x, w, i], domain, (), batch=2)
    for a, b in np.ndindex(5, 3):
        alone = interpret(program, [x[a, b], w[a, b], i[a, 0]], domain, ())
        for one, all_ in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one, all_[a, b])


UNARY = (jnp.negative, jnp.transpose, jax.nn.relu, lambda x: x * x, lambda x: x.sum(0, keepdims=True) + x, lambda x: 3 - x[::-1])
BINARY = (jnp.add, jnp.subtract, jnp.multiply, jnp.matmul, jnp.maximum, jnp.minimum, lambda x, y: jnp.concatenate([x, y])[1:4])
STEPS = st.lists(
    st.tuples(st.integers(0, len(UNARY) + len(BINARY) - 1), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6
)


@given(STEPS, st.integers(0, 99))
@settings(max_examples=fewer(15))
def test_random_graphs(steps, seed):
    def fn(x, y):
        values = [x, y]
        for k, a, b in steps:
            a, b = values[a % len(values)], values[b % len(values)]
            values.append(UNARY[k](a) if k < len(UNARY) else BINARY[k - len(UNARY)](a, b))
        return values[2:]

    args = [np.random.default_rng(seed).integers(-2, 3, (3, 3)).astype(np.float64) for _ in range(2)]
    wanted = [np.asarray(x) for x in fn(*args)]
    exact = [k for k, x in enumerate(wanted) if np.abs(x).max() < 2**29]  # where no order changes by going round
    domain = Modular()
    found = interpret(traced(fn, *args), [domain.constant(a) for a in args], domain, ())
    if len(exact) == len(wanted):
        for k in exact:
            np.testing.assert_array_equal(found[k], domain.constant(wanted[k]))


# On devices


def on_devices(fn, sizes, *stacked):
    """Run a function of local pieces on devices, and interpret it: both results are `[*devices, *local]`."""
    mesh, axes = mesh_of(sizes)
    names = tuple(a.name for a in axes)

    def local(*pieces):
        out = fn(*(x[0] for x in pieces))
        missing = [tuple(n for n in names if n not in jax.typeof(x).manual_axis_type.varying) for x in out]
        return [(lax.pcast(x, m, to="varying") if m else x)[None] for x, m in zip(out, missing, strict=True)]

    flat = [x.reshape(-1, *x.shape[len(sizes) :]) for x in stacked]
    run = jax.shard_map(local, mesh=mesh, in_specs=(P(names),) * len(flat), out_specs=P(names))
    real = [np.asarray(x).reshape(*sizes, *x.shape[1:]) for x in run(*flat)]
    (eqn,) = jax.make_jaxpr(run)(*flat).jaxpr.eqns
    program = core.ClosedJaxpr(eqn.params["jaxpr"], ())
    given = [np.expand_dims(x, len(sizes)) for x in stacked]
    return real, [np.squeeze(x, len(sizes)) for x in interpret(program, given, Plain(), axes)]


def collectives(x):
    both = ("a1", "a0")
    yield lax.psum(x, "a0")
    yield lax.psum(x, both)
    yield lax.pmax(x, "a1")
    yield lax.pmin(x, both)
    for to in ("varying", "invarying"):
        yield lax.all_gather(x, both, axis=1, tiled=True, to=to)
        yield lax.all_gather(x, "a1", axis=1, tiled=False, to=to)
    yield lax.psum_scatter(x, both, scatter_dimension=1, tiled=True)
    yield lax.psum_scatter(x, "a1", scatter_dimension=2, tiled=False)
    yield lax.all_to_all(x, both, split_axis=0, concat_axis=1, tiled=True)
    yield lax.all_to_all(x, "a0", split_axis=1, concat_axis=1, tiled=True)
    yield lax.all_to_all(x, ("a1",), split_axis=2, concat_axis=0, tiled=False)
    yield lax.ppermute(x, "a1", [(0, 1), (1, 2)])
    yield x * lax.axis_index("a1") + lax.axis_index("a0")
    yield lax.switch(lax.axis_index("a1"), [lambda x: x, lambda x: -x, lambda x: x * x], x)
    yield lax.while_loop(lambda c: c[0] < lax.axis_index("a1"), lambda c: (c[0] + 1, c[1] * 2), (0 * lax.axis_index("a1"), x))[1]


def test_collectives_agree_with_devices():
    x = np.random.default_rng(0).integers(-9, 9, (2, 3, 12, 6, 3)).astype(np.float64)
    real, found = on_devices(lambda x: list(collectives(x)), (2, 3), x)
    assert len(real) == 17
    for k, (a, b) in enumerate(zip(real, found, strict=True)):
        np.testing.assert_array_equal(a, b, err_msg=str(k))


def test_integers_and_truth_values_are_concrete_on_devices():
    x = np.random.default_rng(0).integers(-9, 9, (2, 3, 4))

    def fn(x):
        positive = (x > 0) & (x < 5)
        order = lax.sort((positive, jnp.arange(x.size), x.astype(jnp.int8)), num_keys=1)
        return [lax.psum(x, "a0"), lax.pmax(x, ("a0", "a1")), lax.axis_index(("a1", "a0"))[None], x // 2 - x % 3, positive, *order]

    real, found = on_devices(fn, (2, 3), x)
    for a, b in zip(real, found, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


# Domains


RATIONAL = st.fractions(min_value=-50, max_value=50, max_denominator=64).filter(lambda q: q.denominator & (q.denominator - 1) == 0)


@given(RATIONAL, RATIONAL)
def test_residues_of_rationals_are_exact(a, b):
    d = Modular()
    x, y = (d.constant(np.array([float(q)])) for q in (a, b))
    same = [(d.add(x, y), a + b), (d.sub(x, y), a - b), (d.mul(x, y), a * b), (d.neg(x), -a)]
    if b:
        same.append((d.div(x, y), a / b))
    for found, wanted in same:
        assert int(found[0]) * wanted.denominator % PRIME == wanted.numerator % PRIME


@given(st.lists(st.integers(-100, 100), min_size=2, max_size=6))
def test_order_agrees_with_small_integers(numbers):
    d = Modular()
    x = d.constant(np.array(numbers, np.float64))
    ends = d.constant(np.array([-np.inf, np.inf]))
    assert d.fold(d.maximum, x, 0) == max(numbers) % PRIME
    assert d.fold(d.minimum, x, 0) == min(numbers) % PRIME
    np.testing.assert_array_equal(d.maximum(x, ends[0]), x)
    np.testing.assert_array_equal(d.maximum(x, ends[1]), np.full_like(x, ends[1]))
    np.testing.assert_array_equal(d.compare("lt", x[:1], x[1:]), np.array(numbers[0]) < np.array(numbers[1:]))


def test_products_do_not_overflow():
    d = Modular()
    x = np.full((1, 50_000), PRIME - 1)
    assert d.dot(x, x.T)[0, 0] == 50_000
    assert d.dot(x[:, :3], x[:, :3].T + 0)[0, 0] == 3
    assert d.total(x, -1)[0] == -50_000 % PRIME
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, PRIME, (2, 3, 5)), rng.integers(0, PRIME, (2, 5, 4))
    np.testing.assert_array_equal(d.dot(a, b), np.matmul(a.astype(object), b.astype(object)) % PRIME)


def test_functions_have_no_accidental_identities():
    d, rng = Modular(), np.random.default_rng(0)
    x, y = rng.integers(0, PRIME, (2, 100))
    f = d.function
    for a, b in [
        (f("exp", x), f("log", x)),
        (f("exp", d.add(x, y)), d.mul(f("exp", x), f("exp", y))),
        (f("pow", x, y), f("pow", y, x)),
        (f("sin", d.neg(x)), d.neg(f("sin", x))),
        (f("f", d.add(x, y)), d.add(f("f", x), f("f", y))),
        (f("f", f("g", x)), f("g", f("f", x))),
    ]:
        assert not (a == b).any()
    np.testing.assert_array_equal(f("exp", x), Modular().function("exp", x))  # the same in every process


def terms(leaves, binary):
    return st.recursive(leaves, lambda t: st.tuples(st.sampled_from(binary), t, t) | st.tuples(st.just("f"), t), max_leaves=8)


# Residues order integers as the integers are ordered, and a fraction nowhere in particular: no maximum of a fraction.
WHOLE = st.sampled_from("xyz") | st.integers(-3, 3)
TERMS = terms(WHOLE, "+*-m") | terms(WHOLE | st.just(Fraction(1, 2)), "+*-")


def meaning_of(term, domain, given):
    if isinstance(term, str):
        return given[term]
    if not isinstance(term, tuple):
        return domain.constant(np.asarray(float(term)))
    args = [meaning_of(t, domain, given) for t in term[1:]]
    if term[0] == "f":
        return domain.function("f", *args)
    return {"+": domain.add, "*": domain.mul, "-": domain.sub, "m": domain.maximum}[term[0]](*args)


@given(TERMS, TERMS)
def test_symbols_agree_with_residues(left, right):
    """Canonical forms are equal only where residues are, and without maxima, which need an order, exactly there."""
    s, m = Symbolic(), Modular()
    symbols = {n: s.symbols(n, ()) for n in "xyz"}
    residues = {n: np.random.default_rng(k).integers(0, PRIME, 20) for k, n in enumerate("xyz")}
    equal = meaning_of(left, s, symbols) == meaning_of(right, s, symbols)
    same = bool(np.all(meaning_of(left, m, residues) == meaning_of(right, m, residues)))
    assert same if equal else ("m" in str(left) + str(right) or not same)


@pytest.mark.parametrize("long", [3, 100])  # with 3, the square is not multiplied out
def test_equality_of_symbols(long):
    s = Symbolic(long=long)
    x, y = s.symbols("x", (3,)), s.symbols("y", (3,))
    square = s.mul(s.add(x, y), s.add(x, y))
    expanded = s.add(s.add(s.mul(x, x), s.mul(y, y)), s.mul(s.constant(np.full(3, 2.0)), s.mul(x, y)))
    assert np.array_equal(square, expanded) == (long == 100)
    assert compare(s, square, expanded).answer == "equal"
    wrong = compare(s, square, s.add(s.mul(x, x), s.mul(y, y)))
    assert wrong.answer == "different"
    assert wrong.values is not None
    a, b = wrong.values["x[0]"], wrong.values["y[0]"]
    assert (wrong.left, wrong.right) == ((a + b) ** 2, a**2 + b**2)
    # not by canonical form, but by Z3: the larger and the smaller are both
    assert compare(s, s.add(s.maximum(x, y), s.minimum(x, y)), s.add(x, y)).answer == "equal"


def test_an_error_names_the_primitive_and_the_line():
    program = traced(lambda x: x.at[jnp.argmax(x)].set(0), np.ones(3))
    s = Symbolic()
    with pytest.raises(NotInterpreted, match=r"scatter: its ind.* depend on floating values \(.*test_interpret"):
        interpret(program, [s.symbols("x", (3,))], s, ())


ROWS = np.asarray([2, 0, 3, 2])
OUTSIDE = np.asarray([5, -6, 1, 4])  # of four rows, also where counted from the end


@pytest.mark.parametrize(
    ("fn", "indices"),
    [
        (lambda x, y, i: x.at[i].get(mode="promise_in_bounds"), ROWS),
        (lambda x, y, i: x.at[i].get(mode="clip"), OUTSIDE),
        (lambda x, y, i: x.at[i].get(mode="fill"), OUTSIDE),
        (lambda x, y, i: x.at[i].get(mode="fill", fill_value=7.0), OUTSIDE),
        (lambda x, y, i: x[i, jnp.minimum(i, 2)], ROWS),
        (lambda x, y, i: jnp.take_along_axis(x, i[:, None], 1, mode="clip"), ROWS),
        (lambda x, y, i: jax.vmap(lambda row, k: lax.dynamic_slice(row, (k,), (2,)))(x, i), OUTSIDE),
        (lambda x, y, i: x.at[i].add(y), ROWS),
        (lambda x, y, i: x.at[i].add(y, mode="drop"), OUTSIDE),
        (lambda x, y, i: x.at[i].subtract(y, mode="clip"), OUTSIDE),
        (lambda x, y, i: lax.dynamic_slice(x, (i[0], i[1]), (2, 2)), OUTSIDE),
        (lambda x, y, i: lax.dynamic_update_slice(x, y[:2, :2], (i[2], 1)), OUTSIDE),
    ],
)
def test_indices_that_are_elements_agree_with_concrete_ones(fn, indices):
    """Elements that are constants name one of all places."""
    s = Symbolic()
    program = traced(fn, np.ones((4, 3)), np.ones((4, 3)), indices)
    x, y = (StackedValue(s.symbols(name, (4, 3)), False) for name in "xy")
    (known,) = interpret_values(program, [x, y, StackedValue(indices, True)], s, ())
    (found,) = interpret_values(program, [x, y, StackedValue(s.constant(indices), False)], s, ())
    np.testing.assert_array_equal(found.array, s.replaceable(known.array))


def test_a_leading_dimension_of_one_broadcasts():
    program = traced(lambda x, y: [x @ y], np.ones((2, 3)), np.ones((3, 2)))
    d = Modular()
    x, y = np.ones((1, 7, 2, 3), np.int64), np.full((3, 1, 3, 2), 2, np.int64)
    (found,) = interpret(program, [x, y], d, (Axis("a", 3, 0),), batch=1)
    assert found.shape == (3, 7, 2, 2)
    assert (found == 6).all()


def test_bits_of_a_symbolic_key_differ():
    fn, (make,) = CASES["random bits"]
    key = make()
    assert is_key(key)
    s = Symbolic()
    (found,) = interpret(traced(fn, key), [s.symbols("key", ())], s, ())
    assert len(np.unique(found)) == found.size  # every place has its own bits


def test_a_selection_removes_nan():
    """A NaN that is not selected must not make both sides of a proof NaN, which would be equal whatever else they compute."""
    program = traced(lambda x: [jnp.where(x - x + 4 > 0, x, jnp.nan), jnp.where(x > 0, x, jnp.nan)], np.ones(3))
    s = Symbolic()
    x = s.symbols("x", (3,))
    certain, either = interpret(program, [x], s, ())
    np.testing.assert_array_equal(certain, x)
    assert not (either == s.nan).any()
