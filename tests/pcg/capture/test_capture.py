"""A captured graph computes the function, and a function that cannot be captured is refused with the reason."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from functools import partial, reduce
from pathlib import Path

import capture_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from capture_cases import TABLE, TRAPS, X
from ci_cases import fewer, in_turn
from hidden_state import doubled
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas, sparse
from serial_graph import evaluate

import unity
from benchmarks import models
from unity.base.errors import CaptureError
from unity.pcg.capture.capture import Captured, capture, unparallelized
from unity.pcg.ir.graph import PCG
from unity.pcg.jaxprs.parameter_text import text_of
from unity.pcg.parallel.check import check
from unity.pcg.parallel.parallelize import on_one_device

HERE = Path(__file__)
EPSILON = float(np.finfo(np.float32).eps)


def line_of(text: str) -> int:
    """The last line of this file that contains a marker."""
    return max(k for k, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith(f"# {text}"))


def run(captured: Captured, args: tuple) -> object:
    """Compiled whole: one by one, every operator is compiled alone."""
    out = jax.jit(partial(evaluate, captured.graph))([*jax.tree.leaves(args), *captured.consts])
    return jax.tree.unflatten(captured.out_tree, out)


def is_key(x: object) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def same(a: object, b: object, roundings: float) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = (jax.random.key_data(v) if is_key(v) else np.asarray(v) for v in (x, y))
        np.testing.assert_allclose(x, y, rtol=roundings * EPSILON, atol=roundings * EPSILON)


@pytest.mark.parametrize("name", in_turn(TRAPS))
def test_what_is_captured_computes_the_same(name):
    fn, args = TRAPS[name]
    # compiled and uncompiled programs differ by a few roundings of sums over 64 numbers; of one rounding, in bfloat16
    small = any(jnp.result_type(x) == jnp.bfloat16 for x in jax.tree.leaves(args) if not is_key(x))
    same(run(capture(fn, *args, argnums=()), args), fn(*args), roundings=2**16 if small else 64)


@pytest.mark.parametrize("name", TRAPS)
def test_abstract_arguments_give_the_same_graph(name):
    fn, args = TRAPS[name]
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jax.typeof(x).shape, jax.typeof(x).dtype), args)
    concrete, abstract = capture(fn, *args, argnums=()), capture(fn, *structs, argnums=())
    assert concrete.graph.key == abstract.graph.key
    assert concrete.paths == abstract.paths


@pytest.mark.parametrize("name", TRAPS)
def test_every_operator_comes_from_the_users_file(name):
    fn, args = TRAPS[name]
    nodes = [n for n, _ in capture(fn, *args, argnums=()).graph.walk() if n.kind not in ("input", "constant")]
    assert all("capture_cases.py:" in n.source for n in nodes), [n.source for n in nodes]


def test_keys_are_the_same_in_every_process():
    program = (
        f"import sys; sys.path[:0] = [{str(Path(capture_cases.__file__).parent)!r}]\n"
        "from capture_cases import TRAPS\nfrom unity.pcg.capture.capture import capture\n"
        "for name in ('custom_rules', 'typed_key', 'remat_with_policy', 'closes_over_arrays', 'indexing'):\n"
        "    fn, args = TRAPS[name]\n    print(capture(fn, *args).graph.key)\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ | {"PYTHONHASHSEED": seed}
        )
        for seed in ("1", "2")
    ]
    assert runs[0].stdout == runs[1].stdout
    assert len(runs[0].stdout.split()) == 5


def scaled_gradient(scale):
    @jax.custom_vjp
    def identity(x):
        return x * 2

    identity.defvjp(lambda x: (x * 2, None), lambda _, g: (g * scale,))
    return identity


def test_custom_rules_that_differ_make_different_graphs():
    keys = {capture(lambda x, s=s: scaled_gradient(s)(x).sum(), X).graph.key for s in (1.0, 2.0, 1.0)}
    assert len(keys) == 2


def in_a_scan(f, x):
    return lax.scan(lambda c, _: (f(c), None), x, None, length=3)[0]


def in_a_branch(f, x):
    return lax.cond((x == x).all(), f, jnp.negative, x)


def in_a_remat(f, x):
    return jax.checkpoint(lambda x: jnp.sin(f(x)))(x)


@pytest.mark.parametrize("around", [lambda f, x: f(x), in_a_scan, in_a_branch, in_a_remat])
def test_derivative_rules_that_hide_their_state_are_told_apart_wherever_they_are(around):
    fs = doubled(1.0), doubled(3.0)

    def loss(x):
        return sum(around(f, x).sum() for f in fs)

    captured = capture(loss, X)
    gradient = jax.grad(lambda x: run(captured, (x,)))(X)
    np.testing.assert_allclose(gradient, jax.grad(loss)(X), rtol=1e-6)


def test_equal_programs_around_one_function_are_computed_once():
    f = doubled(3.0)
    kinds = [[n.kind for n in capture(lambda x, r=r: sum(in_a_scan(f, x).sum() for _ in range(r)), X).graph.nodes] for r in (1, 2)]
    assert [k.count("scan") for k in kinds] == [1, 1]


def test_functions_that_jax_keeps_as_one_primitive_are_told_apart():
    """Since JAX 0.12 both are `call_hi_primitive`: an object among its parameters has the side."""

    def between(x, y):
        found = [jnp.searchsorted(x, y, side=side) for side in ("left", "right")]
        return jnp.sum(y * (found[0] + 100 * found[1]))

    args = jnp.array([0.0, 1.0, 1.0, 2.0, 3.0, 3.0, 4.0, 5.0]), jnp.arange(8.0)
    assert run(capture(between, *args), args) == between(*args)


def test_what_an_object_with_parameters_is_told_apart_by():
    class Buffer:
        in_avals = (X,)

        def __init__(self, **params):
            self.params = params

        def __call__(self, x):
            return x

    texts = {text_of(Buffer(side=side, by=by), lambda _: None) for side in ("left", "right") for by in (jnp.sin, jnp.cos)}
    assert len(texts) == 4


def test_operators_with_hidden_differences_do_not_share_a_body():
    class Hidden:
        def __init__(self, scale):
            self.scale = scale

        def rule(self):
            @jax.custom_vjp
            def f(x):
                return x * 2

            f.defvjp(lambda x: (x * 2, None), lambda _, g: (g * self.scale,))
            return f

    def loss(x):
        return (Hidden(3.0).rule()(Hidden(5.0).rule()(x))).sum()

    a, b = (n.body for n in capture(loss, X).graph.nodes if n.kind == "custom_vjp")
    assert a is not b


def test_equal_operators_share_their_body():
    def loss(ws, x):
        for w in ws:
            x = jax.nn.gelu(x @ w)
        return x @ x.T

    graph = capture(loss, [np.eye(16, dtype=np.float32)] * 5, X).graph
    assert len({id(n.body) for n in graph.nodes if n.kind == "gelu"}) == 1


def test_a_function_traced_before_is_placed_where_it_is_called_now():
    def loss(x):
        x = jax.nn.gelu(x @ x.T)  # first
        return jax.nn.gelu(x @ x.T)  # second

    lines = [n.source for n in capture(loss, X).graph.nodes if n.kind == "gelu"]
    assert [f"test_capture.py:{line_of(k)}" in s for k, s in zip(("first", "second"), lines, strict=True)] == [True, True]


@jax.jit
def block(x):
    return jnp.sin(x @ x.T)  # inside block


def test_a_jitted_function_of_the_user_keeps_its_own_lines():
    graph = capture(lambda x: block(block(x)), X).graph
    assert [n for n in graph.nodes if n.kind == "sin" and f"test_capture.py:{line_of('inside block')}" in n.source]


@pytest.mark.parametrize("name", ["combine", "reduce", "input", "scan", "branches"])
def test_functions_that_are_called_like_kinds_of_operators_are_told_from_them(name):
    def run(x):
        return jnp.tanh(jnp.sin(x) * 2.0) + jnp.cos(x)

    run.__name__ = name
    graph = capture(lambda x: jax.jit(run)(x) @ X.T, X).graph
    assert f"{name}()" in [n.kind for n in graph.nodes]
    check(on_one_device(graph))


def test_a_general_reduction_is_no_reduce():
    graph = capture(lambda x: lax.reduce(x, 1.0, lambda a, b: a * b + 1.0, (0,)), X).graph
    assert [n.kind for n in graph.nodes if n.operands] == ["reduce()"]
    check(on_one_device(graph))


def test_scopes_are_the_models_names():
    def loss(x):
        with jax.named_scope("encoder"), jax.named_scope("layer_3"):
            y = jax.nn.gelu(x)
        return y @ y.T

    assert [n.scope for n in capture(loss, X).graph.nodes if n.kind == "gelu"] == ["encoder/layer_3"]


def test_large_constants_of_nested_functions_become_inputs():
    big = jnp.ones((64, 64))
    captured = capture(lambda x: jax.jit(lambda x: x @ big)(x) + jax.jit(lambda x: x @ big)(2 * x), np.ones((8, 64), np.float32))
    assert [c.shape for c in captured.consts] == [(64, 64)]
    assert len(captured.graph.inputs) == 2


INDICES = {
    "a literal": lambda: 1,
    "too large": lambda: 7,
    "of an array": lambda: jnp.array([0, 1, 0])[1],
    "of a range": lambda: jnp.arange(3)[1],
    "largest": lambda: jnp.argmax(jnp.array([0.0, 2.0])),
    "compared": lambda: jnp.float32(2) < 3,
    "counted": lambda: reduce(lambda k, _: k + 1, range(2001), jnp.int32(-2000)),
}


@pytest.mark.parametrize("name", INDICES)
def test_a_conditional_with_a_constant_index_is_its_branch(name):
    def chosen(w, v, x):
        return jnp.sum(lax.switch(jnp.int32(INDICES[name]()), [lambda x: x @ w, lambda x: jnp.tanh(x @ v)], x))

    def nested(w, v, x):
        return lax.scan(lambda c, x: (c + jax.jit(chosen)(w, v, x), None), 0.0, x[None])[0]

    args = jax.random.normal(jax.random.key(0), (3, 8, 8))
    for function in (chosen, nested):
        captured = capture(function, *args)
        assert not any("cond" in node.body.primitives for node, _ in captured.graph.walk() if node.body is not None)
        np.testing.assert_allclose(np.asarray(run(captured, tuple(args))), jnp.sum(jnp.tanh(args[2] @ args[1])), rtol=1e-5)


def test_an_index_that_is_computed_keeps_its_branches():
    def chosen(w, x, k):
        return jnp.sum(lax.switch(k, [lambda x: x @ w, lambda x: x], x) + lax.platform_dependent(x, cpu=jnp.sin, cuda=jnp.cos))

    x = jnp.ones((8, 8))
    assert capture(chosen, x, x, jnp.int32(1)).body.primitives.count("cond") == 2


@pytest.mark.parametrize("unroll", [0, 1, 2])
def test_a_scan_of_no_steps_returns_its_carry(unroll):
    args = X, np.ones((0, *X.shape), X.dtype)
    captured = capture(lambda w, xs: lax.scan(lambda c, x: (c * x, c), w, xs, unroll=unroll), *args)
    carry, stack = jax.tree.leaves(run(captured, args))
    np.testing.assert_array_equal(carry, X)
    assert stack.shape == args[1].shape


def test_a_mean_is_taken_once():
    graph = capture(lambda x: (jnp.mean(x, 0), (x - jnp.mean(x, 0)).sum()), X).graph
    reductions = [e for n in graph.nodes if n.body for e in n.body.equations if e.name == "reduce_sum"]
    assert len(reductions) == 2


WITHOUT_ELEMENTS = {
    "slice": lambda w, x: jnp.tanh(x @ w)[2:2],
    "product": lambda w, x: jnp.tanh(x[:0] @ w),
    "gather": lambda w, x: (x @ w)[jnp.zeros((0,), int)],
    "sort": lambda w, x: jnp.sort(jnp.sin(x @ w)[:, 1:1]),
    "dynamic slice": lambda w, x: lax.dynamic_slice(x @ w, (w[0, 0].astype(int), 0), (0, 4)),
    "scatter": lambda w, x: (x @ w)[:0].at[jnp.argmax(x, 0)].add(x, mode="drop"),
    "sum of none": lambda w, x: jnp.sum((x @ w)[3:3]),
    "sum of none, added": lambda w, x: jnp.sum((x @ w)[3:3]) + jnp.ones((4,)),
    "product over none": lambda w, x: (x @ w)[:, 4:] @ w[4:],
    "narrow product over none": lambda w, x: (x @ w).astype("bfloat16")[:, 4:] @ jnp.ones((0, 4), "bfloat16"),
    "conditional": lambda w, x: lax.cond(x[0, 0] > 0, lambda: (x @ w)[:0], lambda: (x + w)[:0]),
    "scan": lambda w, x: lax.scan(lambda c, b: (c @ w, (b @ w)[:0]), jnp.zeros((0, 4)), x),
    "checkpoint": lambda w, x: jax.checkpoint(lambda w: jnp.sin(x @ w)[:0])(w),
    "bits of a key": lambda w, x: jax.random.uniform(jax.random.wrap_key_data((x @ w)[0, :2].astype("uint32")), (0,)),
}


@pytest.mark.parametrize("name", WITHOUT_ELEMENTS)
def test_no_operator_computes_what_only_results_without_elements_read(name):
    fn, args = WITHOUT_ELEMENTS[name], (jnp.ones((4, 4)), jnp.asarray(X[:4, :4]))
    plan = unity.optimize(lambda w, x: (fn(w, x), jnp.sum(x)), *args, machine=unity.Machine.grid(1, 2), progress=False, budget=0)
    same(plan(*args), (fn(*args), jnp.sum(args[1])), 1)
    same(jax.grad(lambda w: sum(map(jnp.sum, jax.tree.leaves(plan(w, args[1])))))(args[0]), np.zeros((4, 4)), 0)
    assert not [e for node, _ in plan.program.pcg.walk() if node.body for e in node.body.equations if e.name == "dot_general"]


def test_differentiated_are_the_leaves_of_argnums():
    args = ({"a": X, "b": X}, X, [X, X])
    found = {k: capture(lambda p, x, q: p["a"].sum(), *args, argnums=k).differentiated for k in (0, 1, (0, 2), -1)}
    assert found == {0: {0, 1}, 1: {2}, (0, 2): {0, 1, 3, 4}, -1: {3, 4}}


# --- what is refused ---


def refused(fn, *args, **kwargs):
    with pytest.raises(CaptureError) as caught:
        capture(fn, *args, **kwargs)
    return str(caught.value)


def test_control_flow_on_values_is_refused_with_its_line():
    def loss(x):
        if x.sum() > 0:  # branches
            return x
        return -x

    message = refused(loss, X)
    assert f"test_capture.py:{line_of('branches')}" in message
    assert "lax.cond" in message
    assert "loss" in message


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * float(x[0, 0]),
        lambda x: x * int(x[0, 0]),
        lambda x: x[x > 0],
        lambda x: np.asarray(x) + 1,
        lambda x: jnp.zeros(x[0, 0].astype(int)),
        lambda x: [1, 2, 3][x[0, 0].astype(int)],
        lambda x: jnp.arange(x.sum()),
        lambda x: jnp.nonzero(x),
    ],
)
def test_looking_at_values_is_refused(fn):
    message = refused(fn, X)
    assert "not known while it is planned" in message
    assert "test_capture.py:" in message


@pytest.mark.parametrize("leaf", ["text", object(), lambda x: x, {1, 2}])
def test_leaves_that_are_no_arrays_are_refused_by_their_path(leaf):
    message = refused(lambda p, x: x, {"weights": [X, leaf]}, X)
    assert "args[0]['weights'][1]" in message
    assert type(leaf).__name__ in message


@pytest.mark.parametrize("leaf", [np.array(["a", "b"]), np.array([object()])])
def test_arrays_of_what_jax_has_none_of_are_refused_by_what_they_hold(leaf):
    assert f"args[0]['ids'] is a ndarray of {leaf.dtype}" in refused(lambda p, x: x, {"ids": leaf}, X)


def test_a_static_argument_is_refused_with_the_way_out():
    fn = jax.jit(lambda x, train: x * 2 if train else x, static_argnums=1)
    message = refused(fn, X, True)
    assert "functools.partial" in message
    assert "test_capture.py:" in message


@pytest.mark.parametrize("argnums", [2, -3, (0, 5), "weights", None])
def test_argnums_out_of_range_are_refused(argnums):
    assert "2 arguments" in refused(lambda x, y: x, X, X, argnums=argnums)


def test_argnums_without_real_numbers_are_refused():
    message = refused(lambda tokens, w: w[tokens].sum(), np.arange(3), TABLE)
    assert "no gradient" in message
    assert "int" in message
    assert "training=False" in message


def test_leaked_values_are_refused_with_the_line_that_reads_them():
    left = []

    def leak(x):
        left.append(x[0])
        return x

    def loss(x):
        return (x + left[0]).sum()  # reads it

    jax.make_jaxpr(leak)(X)
    message = refused(loss, X)
    assert "another trace" in message
    assert f"test_capture.py:{loss.__code__.co_firstlineno + 1} (" in message
    assert f"loss) reads a {X.dtype}[{X.shape[1]}]" in message


def test_planning_inside_of_a_trace_is_refused():
    message = []

    def step(w, x):
        message.append(refused(lambda x: (x * w).sum(), X))
        return x

    jax.make_jaxpr(step)(X, X)
    assert "another trace" in message[0]


def test_results_that_are_no_arrays_are_refused():
    assert "not an array" in refused(lambda x: {"loss": x.sum(), "name": "loss"}, X)


def test_a_kernel_that_communicates_is_refused_by_its_line():
    def neighbour(x, y):
        y[...] = x[...] * jax.lax.axis_index("d")

    def body(x):
        return pallas.pallas_call(neighbour, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = jax.shard_map(body, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"), check_vma=False)
    message = refused(lambda x: placed(x @ x).sum(), jax.ShapeDtypeStruct((8, 8), jnp.float32))
    assert "pallas_call inside of a shard_map cannot be planned" in message
    assert "communicates with other devices itself" in message
    assert "test_capture.py" in message


def test_equations_of_a_shard_map_keep_their_lines_and_scopes():
    def body(x):
        with jax.named_scope("inside"):
            y = jnp.sin(x)
        return jax.lax.psum(y, "d")

    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P())
    equations = {e.name: e for e in capture(mapped, jnp.ones(16)).body.equations}
    line = inspect.getsourcelines(body)[1]
    assert f"test_capture.py:{line + 2} (" in equations["sin"].source
    assert f"test_capture.py:{line + 3} (" in equations["reduce_sum"].source
    assert equations["sin"].scope == "inside"


@pytest.mark.parametrize("error", [ValueError("mine"), KeyError("mine"), TypeError("mine"), ZeroDivisionError("mine")])
def test_what_the_function_raises_passes_through_with_a_note(error):
    def loss(x):
        raise error

    with pytest.raises(type(error)) as caught:
        capture(loss, X)
    assert caught.value is error
    assert any("loss" in note and "plan" in note for note in caught.value.__notes__)


# --- any small program ---

UNARY = (jnp.sin, jnp.tanh, jax.nn.relu, jax.nn.softmax, jax.nn.gelu, lambda x: x - jnp.mean(x, 0), lambda x: x.T, jnp.cumsum)
BINARY = (jnp.add, jnp.multiply, lambda x, y: x @ y.T, jnp.maximum, lambda x, y: jnp.where(x > 0, x, y))


@st.composite
def programs(draw):
    """A list of steps: each a function and which earlier values it takes."""
    steps = []
    for k in range(draw(st.integers(1, 12))):
        arity = draw(st.integers(1, 2))
        fn = draw(st.sampled_from(range(len(UNARY if arity == 1 else BINARY))))
        steps.append((arity, fn, [draw(st.integers(0, k)) for _ in range(arity)]))
    outputs = draw(st.lists(st.integers(0, len(steps)), min_size=1, max_size=3))
    return steps, outputs


def interpret(program, x):
    steps, outputs = program
    values = [x]
    for arity, fn, sources in steps:
        out = (UNARY if arity == 1 else BINARY)[fn](*(values[s] for s in sources))
        values.append(jnp.tanh(out.reshape(x.shape)))
    return [values[k] for k in outputs]


@settings(max_examples=fewer(50))
@given(programs())
def test_any_program_is_captured_as_it_is(program):
    x = X[:4, :4]
    captured = capture(lambda x: interpret(program, x), x)
    found = evaluate(captured.graph, [x, *captured.consts])  # uncompiled: of all programs, these operators are the same few
    # each step may double a difference of a rounding
    same(found, interpret(program, x), roundings=8 * 2 ** len(program[0]))


@settings(max_examples=fewer(50))
@given(programs())
def test_operators_are_ordered_and_cover_the_program(program):
    captured = capture(lambda x: interpret(program, x), X[:4, :4])
    assert_sound(captured.graph)


def assert_sound(graph: PCG):
    seen = set()
    for node in graph.nodes:
        assert all(id(v.node) in seen for v in node.operands)
        seen.add(id(node))
        if node.body is not None:
            assert [str(node.body.tensors[v]) for v in node.body.inputs] == [str(v.tensor) for v in node.operands]
            assert [str(node.body.tensor(a)) for a in node.body.outputs] == [str(t) for t in node.tensors]
        if node.inside is not None:
            assert_sound(node.inside)


@pytest.mark.parametrize("name", ["gpt2", "bert_large", "lenet5", "nmt", "dlrm"])
def test_benchmark_models_are_captured_whole(name):
    model = models.tiny(name)
    captured = capture(model.loss, model.params, model.batch)
    assert_sound(captured.graph)
    assert not unparallelized(captured.graph)
    assert not captured.consts
    args = models.concrete(model)
    np.testing.assert_allclose(np.asarray(run(captured, args)), np.asarray(jax.jit(model.loss)(*args)), rtol=1000 * EPSILON)


def test_a_sparse_matrix_is_captured():
    """Of its products, a parameter has a type of NumPy's, which has attributes as arrays have."""
    matrix = sparse.BCOO.fromdense(jnp.eye(8) + jnp.eye(8, k=1), nse=15)

    def loss(w):
        return ((matrix @ w) ** 2).mean()

    w = jnp.arange(32.0).reshape(8, 4)
    captured = capture(loss, w)
    assert captured.body.key == capture(loss, w).body.key


@pytest.mark.parametrize("reverse", [False, True])
def test_a_loop_of_no_steps_is_what_it_carries(reverse):
    def fn(w, x):
        (a, b), ys = jax.lax.scan(lambda c, _: ((jnp.tanh(c[1] @ w), c[0]), c[0].sum(0)), (x @ w, x), None, 0, reverse)
        return a * b, ys

    w, x = X[:8, :8] / 8, X[:, :8]
    captured = capture(fn, w, x)
    assert "scan" not in {node.kind for node in captured.graph.nodes}
    same(run(captured, (w, x)), fn(w, x), roundings=4)
