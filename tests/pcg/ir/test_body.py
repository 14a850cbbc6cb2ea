"""Bodies: read from jaxprs with calls inlined, and known by their content."""

import os
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unity.pcg.ir.dead_code import extract, used
from unity.pcg.ir.program import Body, Literal, close

X = np.zeros((4, 6), np.float32)


def body_of(fn, *args):
    return close(jax.make_jaxpr(fn)(*(args or (X, X))))


def renumbered(body: Body) -> Body:
    """The same program with other numbers."""
    new = {v: 1000 - 7 * v for v in body.tensors}

    def atom(a):
        return new[a] if isinstance(a, int) else a

    equations = tuple(
        replace(e, operands=tuple(map(atom, e.operands)), results=tuple(map(atom, e.results))) for e in body.equations
    )
    tensors = {new[v]: t for v, t in body.tensors.items()}
    return Body(tuple(map(atom, body.inputs)), tuple(map(atom, body.outputs)), equations, tensors)


PROGRAMS = {
    "plain": lambda x, y: jnp.sin(x) * y,
    "other operand": lambda x, y: jnp.sin(y) * x,
    "other order": lambda x, y: y * jnp.sin(x),
    "other operator": lambda x, y: jnp.cos(x) * y,
    "another output": lambda x, y: (jnp.sin(x) * y, x),
    "outputs": lambda x, y: (jnp.sin(x), jnp.sin(x) * y),
    "outputs, other order": lambda x, y: (lambda s: (s * y, s))(jnp.sin(x)),
    "literal": lambda x, y: jnp.sin(x) * y + 1.0,
    "other literal": lambda x, y: jnp.sin(x) * y + 2.0,
    "array literal": lambda x, y: jnp.sin(x) * y + np.arange(6, dtype=np.float32),
    "other array literal": lambda x, y: jnp.sin(x) * y + np.arange(6, dtype=np.float32)[::-1],
    "parameter": lambda x, y: x.sum(0) + y.sum(0),
    "other parameter": lambda x, y: x.sum(0) + y.sum(0, keepdims=True),
    "scan": lambda x, y: lax.scan(lambda c, r: (c + r, c), y[0], x)[1],
    "scan, other step": lambda x, y: lax.scan(lambda c, r: (c - r, c), y[0], x)[1],
    "scan, reversed": lambda x, y: lax.scan(lambda c, r: (c + r, c), y[0], x, reverse=True)[1],
    "cond": lambda x, y: lax.cond(x[0, 0] > 0, lambda: x, lambda: y),
    "cond, other branch": lambda x, y: lax.cond(x[0, 0] > 0, lambda: x, lambda: x),
    "relu": lambda x, y: jax.nn.relu(x) * y,
    "silu": lambda x, y: jax.nn.silu(x) * y,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_key_does_not_depend_on_names(name):
    body = body_of(PROGRAMS[name])
    assert renumbered(body).key == body.key
    assert body_of(PROGRAMS[name]).key == body.key


def test_the_key_differs_where_anything_does():
    bodies = {name: body_of(fn) for name, fn in PROGRAMS.items()}
    bodies["other shape"] = body_of(PROGRAMS["plain"], X[:2], X[:2])
    bodies["other dtype"] = body_of(PROGRAMS["plain"], X.astype(np.int32), X)
    assert len({b.key for b in bodies.values()}) == len(bodies)


def test_the_key_is_the_same_in_another_process():
    """Whatever the addresses and the hash seed are."""
    read = "print({n: t.body_of(f).key for n, f in t.PROGRAMS.items()})"
    code = f"import sys; sys.path.insert(0, sys.argv[1]); import test_body as t; {read}"
    here = __file__.rpartition("/")[0]
    out = subprocess.run(
        [sys.executable, "-c", code, here],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert out.stdout.strip() == str({n: body_of(f).key for n, f in PROGRAMS.items()})


def test_calls_are_inlined_and_remembered():
    inner = jax.jit(lambda x: jnp.sin(x) + 1)
    body = body_of(lambda x, y: inner(x) * inner(y))
    assert [e.name for e in body.equations] == ["sin", "add", "sin", "add", "mul"]
    assert body.equations[0].group == body.equations[1].group != body.equations[2].group
    assert body.equations[4].group == ()


def test_a_loop_whose_rows_end_apart_has_one_predicate():
    def row(x, y):
        return lax.while_loop(lambda c: c.sum() < 3, lambda c: c + y, x)

    (loop,) = (e for e in body_of(jax.vmap(row)).equations if e.name == "while")
    assert loop.params["cond_jaxpr"].out_avals[0].shape == ()
    assert "test_body.py" in loop.source


def test_leaves_of_a_tree_that_is_placed_have_nothing_in_common():
    body = body_of(lambda x, y: jax.device_put((jnp.sin(x), jnp.cos(y), x)))
    assert [e.name for e in body.equations] == ["sin", "cos"]
    assert body.outputs == (*(e.results[0] for e in body.equations), body.inputs[0])


def test_constants_become_literals():
    table = np.arange(6, dtype=np.float32)
    body = body_of(lambda x, y: x + table)
    assert len(body.inputs) == 2
    assert any(isinstance(a, Literal) and a.tensor.shape == (6,) for e in body.equations for a in e.operands)


def test_zero_literals_may_stand_in_a_sum():
    body = body_of(lambda x, y: (x + 0.0, x + 1.0, lax.convert_element_type(x, jnp.int32) + 0, (x > y) | False))
    zero = [a.zero for e in body.equations for a in e.operands if isinstance(a, Literal)]
    assert zero == [True, False, True, False]


def test_used_keeps_what_outputs_need():
    body = body_of(lambda x, y: (jnp.cos(y), jnp.sin(x))[1])
    assert [e.name for e in body.equations] == ["cos", "sin"]
    assert [e.name for e in used(body).equations] == ["sin"]


def test_extract_makes_a_body_of_some_equations():
    body = body_of(lambda x, y: jnp.exp(jnp.sin(x) * y))
    part, order = extract(body, [1], body.equations[1].results, {})
    assert [e.name for e in part.equations] == ["mul"]
    assert order == (body.equations[0].results[0], body.inputs[1]) == part.inputs
    copied, order = extract(body, [1], body.equations[1].results, {body.equations[0].results[0]: 0})
    assert [e.name for e in copied.equations] == ["sin", "mul"]
    assert set(order) == set(body.inputs)
