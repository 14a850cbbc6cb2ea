"""Solutions: every equation of a body uses an axis legally, and the boundary states determine the inner ones."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operator_cases import CASES
from parallel_cases import inner_seeds

from unity.pcg.ir.program import Literal, close
from unity.pcg.jaxprs.jaxprs import NESTING
from unity.pcg.propagation.choice import AGREED
from unity.pcg.propagation.choices import choices
from unity.pcg.propagation.constants import constants
from unity.pcg.propagation.nested.agreements import nested_agreements
from unity.pcg.propagation.placement import along_axis
from unity.pcg.propagation.propagation import Propagation, Unmatched
from unity.pcg.propagation.solver import NESTED, equation_matches, solve
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, partitioned

P = partitioned
x, w, v = np.zeros((4, 6)), np.zeros((6, 12)), np.zeros((12, 6))


@pytest.fixture(autouse=True)
def exact():
    with jax.enable_x64(True):
        yield


def body_of(fn, *args):
    return close(jax.make_jaxpr(fn)(*args))


def legal(body):
    """Return (operands, results) of every choice of a single operator but unused and replicated."""
    return {(c.operands, c.results) for c in choices(body) if c.name not in ("unused", "replicated")}


@pytest.mark.parametrize("name", CASES)
def test_every_equation_of_a_solution_is_a_legal_match(name):
    fn, args = CASES[name]
    body = body_of(lambda *a: jax.tree.leaves(fn(*a)), *(a() if callable(a) else a for a in args))
    for choice in choices(body, inner_seeds(body))[1:]:
        solution = along_axis(body, choice.operands, choice.results)
        assert solution is not None
        assert (solution.operands, solution.results) == (choice.operands, choice.results)
        agreed = {(a.where, AGREED) for a in nested_agreements(solution) if a.kind and a.elements == 1}
        assert {(r.variable, r.kind) for r in choice.reduced if r.kind} == {*solution.reduced.items(), *agreed}
        used = {v: users for v, users in solution.users(body).items() if users}
        assert {r.variable: r.users for r in choice.reduced if r.users} == used
        for v, kind in solution.reduced.items():
            assert v not in body.inputs
            assert kind != "sum" or solution.states[v] == PARTIAL
        if not solution.matches:  # replicated
            continue
        for i, (e, match) in enumerate(zip(body.equations, solution.matches, strict=True)):
            operands = [
                match.operands[k] if isinstance(a, Literal) or (i, k) in solution.contributed else solution.seen(a)
                for k, a in enumerate(e.operands)
            ]
            made = [solution.states[v] for v in e.results]
            assert (tuple(operands), tuple(made)) == (match.operands, match.results), (name, e.name)
            known = dict(enumerate([*operands, *made]))
            if e.name not in NESTED:
                assert match.name in [m.name for m in equation_matches(body, e, known)]
            for k, (a, s) in enumerate(zip(e.operands, match.operands, strict=True)):
                added = isinstance(a, Literal) and s == PARTIAL and (a.zero or (i, k) in solution.contributed)
                part = isinstance(a, Literal) and s.kind == "P" and a.sliceable
                assert not isinstance(a, Literal) or s == REPLICATED or added or part
            for k, (a, s) in enumerate(zip(e.operands, operands, strict=True)):
                if (i, k) in solution.contributed:
                    continue
                constant = isinstance(a, int) and a in constants(body).constant
                assert not (constant and s == PARTIAL) or a in constants(body).zero, "a constant is not the sum of its copies"


@pytest.mark.parametrize("name", CASES)
def test_solving_from_the_ends_finds_the_same(name):
    fn, args = CASES[name]
    body = body_of(lambda *a: jax.tree.leaves(fn(*a)), *(a() if callable(a) else a for a in args))
    for choice in choices(body):
        again = along_axis(body, choice.operands, choice.results)
        assert again is None or (again.operands, again.results) == (choice.operands, choice.results)


# What is expected of some composites


def test_layers_of_a_perceptron():
    body = body_of(lambda x, w, v: jax.nn.relu(x @ w) @ v, x, w, v)
    found = legal(body)
    rows = ((P(0), REPLICATED, REPLICATED), (P(0),))
    columns = ((REPLICATED, REPLICATED, P(1)), (P(1),))
    hidden = ((REPLICATED, P(1), P(0)), (PARTIAL,))  # Megatron's
    assert {rows, columns, hidden} <= found
    linear_at_the_end = ((REPLICATED, REPLICATED, PARTIAL), (PARTIAL,))
    assert linear_at_the_end in found
    assert all(c.reduced or c.scatters for c in choices(body) if PARTIAL in c.operands[:2]), "a relu is not linear"


def test_a_bias_is_added_once():
    found = legal(body_of(lambda x, w, b: x @ w + b, x, w, np.zeros(12)))
    assert ((P(1), P(0), PARTIAL), (PARTIAL,)) in found
    assert not any(operands[:2] == (P(1), P(0)) and operands[2] == REPLICATED for operands, _ in found)


def test_softmax_over_a_partitioned_dimension_reduces_twice():
    (choice,) = [c for c in choices(body_of(jax.nn.softmax, x)) if c.operands == (P(1),)]
    assert sorted(r.kind for r in choice.reduced) == ["max", "sum"]
    assert choice.results == (P(1),)
    (other,) = [c for c in choices(body_of(jax.nn.softmax, x)) if c.operands == (P(0),)]
    assert other.reduced == ()
    assert {r.variable for r in choice.reduced} <= other.partitions, "its rows make the other's Reduces smaller"


def test_a_mean_is_a_partial_sum():
    (choice,) = [c for c in choices(body_of(lambda x: x.mean(1), x)) if c.operands == (P(1),)]
    assert (choice.results, choice.reduced) == ((PARTIAL,), ())


def test_a_maximum_that_is_differentiated_is_not_split():
    assert not any(c.operands == (P(1),) for c in choices(body_of(lambda x: x.max(1), x)))
    assert any(c.operands == (P(1),) and c.results == (UNUSED,) for c in choices(body_of(lambda x: x.max(1), x.astype(int))))


def test_scalars_and_zeros_pass_partial_sums_as_they_may():
    partial = ((PARTIAL,), (PARTIAL,))
    assert partial in legal(body_of(lambda x: 3 * x, x))
    assert partial in legal(body_of(lambda x: x + 0.0, x))
    assert partial in legal(body_of(lambda x: jnp.concatenate([x, jnp.zeros((4, 1))], 1), x))
    for dtype in (float, int):
        for fn in (lambda x: x + np.zeros((), x.dtype), lambda x: jnp.concatenate([x, jnp.zeros((4, 1), x.dtype)], 1)):
            found = along_axis(body_of(fn, x.astype(dtype)), *partial)
            assert found is not None
            assert not found.contributed, "zeros are the sum of their copies"
    for fn in (lambda x: x + 1.0, lambda x: jnp.concatenate([x, jnp.ones((4, 1))], 1)):
        body = body_of(fn, x)
        assert partial in legal(body)
        found = along_axis(body, *partial)
        assert found is not None
        assert found.contributed, "a constant is one device's"
    assert partial not in legal(body_of(lambda x: jnp.where(x > 0, x, 0.0), x))


@pytest.mark.parametrize("dtype", [int, float])
def test_a_sum_that_is_partial_has_its_terms_in_any_digit(dtype):
    """The digit follows from the operand, although the result alone leaves one match."""
    body = body_of(lambda i: jnp.zeros(7, dtype).at[i].add(1), np.zeros(12, int))
    for digit in (1, 3):
        found = along_axis(body, (P(0, digit),), (PARTIAL,))
        assert found is not None
        assert found.changes is False


def test_reshapes_follow_digits():
    found = legal(body_of(lambda x: x.reshape(2, 6, 4, 3), np.zeros((2, 6, 12))))
    assert {((P(2),), (P(2),)), ((P(2, 4),), (P(3),))} <= found
    body = body_of(lambda x: x.reshape(8, 9), np.zeros((2, 36)))
    assert {((P(0),), (P(0),)), ((P(1),), (P(0, 2),)), ((P(1, 4),), (P(1),))} <= legal(body)


def test_seeds_add_inner_digits():
    body = body_of(jnp.sin, np.zeros((4, 12)))
    assert ((P(1, 3),), (P(1, 3),)) not in legal(body)
    seeded = {(c.operands, c.results) for c in choices(body, [(0, P(1, 3))])}
    assert ((P(1, 3),), (P(1, 3),)) in seeded
    assert legal(body) <= seeded


def test_custom_rules_decide_with_the_body():
    """A rule that divides a cotangent by its norm runs on slices, whose squares devices add, but on no replica."""
    fn, args = CASES["custom_vjp, not linear in the cotangent"]
    assert [c.operands for c in choices(body_of(fn, *args))] == [(UNUSED,), (P(0),), (P(1),), (PARTIAL,)]
    assert not any(REPLICATED in c.states for c in choices(body_of(lambda x: fn(jnp.sin(x)), *args)))


@pytest.mark.parametrize("name", ["custom_vjp, gradients of two turned", "custom_jvp, gradients doubled"])
def test_operands_that_a_rule_forwards_can_be_divided(name):
    """A call that only forwards its operand can be divided along each dimension, into as many slices as it has rows."""
    fn, args = CASES[name]
    found = {c.operands: (c.results, c.size, c.divided) for c in choices(body_of(fn, *args))}
    rows, columns = (P(0),) * len(args), (P(1), *(REPLICATED for _ in args[1:]))
    assert found[rows] == (rows, 4, 1.0)
    assert found[columns] == (columns, 6, 1.0)
    for k in range(len(args)):  # alone
        assert tuple(P(0) if j == k else REPLICATED for j in range(len(args))) in found


def test_a_rule_that_looks_at_values_runs_whole():
    @jax.custom_jvp
    def looking(x):
        return jnp.sin(x)

    @looking.defjvp
    def _(primals, tangents):
        return jnp.sin(primals[0]), tangents[0] * float(primals[0].sum())

    assert {s for c in choices(body_of(looking, x)) for s in c.states} == {UNUSED}


def test_a_branch_that_forwards_does_not_hide_the_work_of_others():
    body = body_of(lambda i, x: jax.lax.switch(i, [jnp.sin, lambda v: v], x), np.int32(1), x)
    assert {c.operands[1] for c in choices(body) if c.divided} == {P(0), P(1)}


def test_every_nesting_primitive_is_solved():
    assert NESTED.keys() == NESTING


def test_devices_agree_on_a_predicate():
    body = body_of(lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x), x)
    assert legal(body) == {((P(d),), (P(d),)) for d in range(x.ndim)}
    (first, *_) = (c for c in choices(body) if c.divided)
    assert [r.kind for r in first.reduced] == [AGREED]
    each = body_of(lambda x: jax.lax.while_loop(lambda c: c[0] < 9, lambda c: jnp.sort(c), x), x[0])
    assert legal(each) == set()
    assert ((P(0),), (P(0),)) in legal(body_of(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(y), x), x))


def test_illegal_states_are_refused():
    body = body_of(lambda x, y: x + y, x, x)
    a, b = body.inputs
    with pytest.raises(Unmatched):
        solve(body, {a: P(0), b: P(1)})
    with pytest.raises(Unmatched):
        solve(body, {a: PARTIAL, b: REPLICATED})
    with pytest.raises(Unmatched):
        solve(body_of(jnp.sin, x), {0: PARTIAL})


def test_a_custom_rule_that_rounds_cotangents_is_not_replicated_for_use() -> None:
    @jax.custom_jvp
    def rounded(x: jax.Array) -> jax.Array:
        return x * 1.0

    @rounded.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return rounded(primals[0]), jax.lax.reduce_precision(tangents[0], 8, 7)

    x = jnp.ones((4, 4))
    assert not any(s == REPLICATED for c in choices(close(jax.make_jaxpr(rounded)(x))) for s in c.operands)
    assert any(s == REPLICATED for c in choices(close(jax.make_jaxpr(jax.nn.relu)(x))) for s in c.operands)


@pytest.mark.parametrize("fn", [jnp.tanh, jax.nn.relu, lambda x: jax.nn.relu(jnp.tanh(x)) - 1])
def test_a_sum_of_rows_is_reduced_beside_a_partitioned_function(fn):
    body = body_of(lambda x, y: fn(x) * y.mean(1, keepdims=True), x, x)
    solution = solve(body, dict.fromkeys(body.inputs, P(1)))
    assert solution.results == (P(1),)
    assert [(body.tensors[v].shape, kind) for v, kind in solution.reduced.items()] in ([((4, 1), "sum")], [((4,), "sum")])


def test_an_equation_is_visited_once_for_all_states_that_are_set_around_it():
    class Counted(Propagation):
        visits = 0

        def visit(self, i, default=False, deferred=False):
            self.visits += 1
            super().visit(i, default, deferred)

    body = body_of(lambda a, b, c: jnp.tanh(a * b + b * c) - a, *np.ones((3, 4, 6)))
    (result,) = (a for a in body.outputs if isinstance(a, int))
    propagation = Counted(body, dict.fromkeys((*body.inputs, result), P(0)), {}, equation_matches)
    assert set(propagation.run().states.values()) == {P(0)}
    assert propagation.visits == len(body.equations)


def test_two_sums_are_reduced_rather_than_one_and_their_product():
    """Then neither all-reduce awaits the other, whichever operand of the product comes first."""

    def cosine(x, y):
        return (x * y).sum(-1) / jnp.sqrt((x * x).sum(-1) * (y * y).sum(-1))

    for fn in (cosine, lambda x, y: cosine(y, x)):
        (choice,) = [c for c in choices(body_of(fn, x, x)) if c.operands == (P(1), P(1))]
        assert choice.results == (PARTIAL,)
        body = body_of(fn, x, x)
        solution = along_axis(body, choice.operands, choice.results)
        assert solution is not None
        producers = {v: e.name for e in body.equations for v in e.results}
        assert [producers[v] for v in solution.reduced] == ["reduce_sum", "reduce_sum"]


@pytest.mark.parametrize("fn", [lambda a, b: a + b, lambda a, b: 3 * a - b / 2, lambda a, b: (1 + a + b) * 2])
def test_sums_that_are_only_added_up_are_reduced_together(fn):
    """Before a function that is not linear: the rows of two operands, in one all-reduce forward and one backward."""
    body = body_of(lambda x, y: jnp.sqrt(fn((x * x).sum(1), (y * y).sum(1))), x, x)
    solution = along_axis(body, (P(1), P(1)), (REPLICATED,)) or along_axis(body, (P(1), P(1)), (UNUSED,))
    assert solution is not None
    assert len(solution.reduced) == 1
