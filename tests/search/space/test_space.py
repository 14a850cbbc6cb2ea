"""The space is complete: programs that compute the same have equal plans, however they are written."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import CI, by_hand, fewer
from small_models import random_point
from stepped import stepped

from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.capture.clustering import EquationCluster, restored
from unity.pcg.capture.heavy_operators import constants
from unity.pcg.ir.graph import PCG, UNCHANGED
from unity.pcg.ir.program import Body, close
from unity.pcg.parallel.parallelize import parallelize
from unity.pcg.propagation.choices import choices
from unity.pcg.types.parallel_type import PARTIAL, UNUSED, partitioned
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.search.cost.assembly import assemble
from unity.search.cost.cost import Training
from unity.search.session import Candidate, Search

EIGHT = Machine.grid(4, 2, "v100")


def f(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def by_log_softmax(w: Any, x: Any, y: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ w), y[..., None], -1).mean()


def by_logsumexp(w: Any, x: Any, y: Any) -> Any:
    logits = x @ w
    return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, y[..., None], -1)[..., 0]).mean()


def by_vmap(w: Any, x: Any, y: Any) -> Any:
    def one(x: Any, y: Any) -> Any:
        logits = x @ w
        return jax.nn.logsumexp(logits) - logits[y]

    return jax.vmap(one)(x, y).mean()


def by_one_hot(w: Any, x: Any, y: Any) -> Any:
    logits = x @ w
    shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    return (jnp.log(jnp.exp(shifted).sum(-1)) - (shifted * jax.nn.one_hot(y, logits.shape[-1])).sum(-1)).mean()


def carried(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, xs, ys: jax.lax.scan(lambda total, batch: (total + loss(w, *batch), None), 0.0, (xs, ys))[0]


def stacked(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, xs, ys: jax.lax.scan(lambda c, batch: (c, loss(w, *batch)), None, (xs, ys))[1].sum()


def averaged(w: Any, xs: Any, ys: Any) -> Any:
    """A running mean, and what it was in every step, beside the sum."""

    def step(carry: Any, batch: Any) -> Any:
        loss = by_log_softmax(w, *batch)
        total, mean = carry[0] + loss, 0.9 * carry[1] + 0.1 * loss
        return (total, mean), mean

    (total, mean), means = jax.lax.scan(step, (0.0, 0.0), (xs, ys))
    return total + mean + jnp.sin(means).sum()


def search(fn: Callable[..., Any], args: tuple, machine: Machine) -> Search:
    found = capture(fn, *args)
    return Search(found.graph, found.differentiated, machine, Training())


def test_the_same_loss_has_the_same_plan_however_it_is_written() -> None:
    """Where the log of the soft-max is asked for, the log of the sum is subtracted from every class before one is taken: its
    gradient is a sum over the classes, and one all-reduce more where these are divided."""
    machine, args = Machine.preset("dgx-h100-4x8"), (f(1024, 32000), f(8192, 1024), f(8192, dtype="int32"))
    times = [search(fn, args, machine).fastest.time for fn in (by_logsumexp, by_vmap, by_one_hot, by_log_softmax)]
    assert max(times[:3]) <= 1.01 * min(times)
    assert max(times) <= 1.15 * min(times)


def test_a_carried_sum_costs_as_much_as_a_returned_one() -> None:
    """It is reduced once, after the loop, and the vocabulary may be split meanwhile."""
    machine, args = Machine.grid(1, 8, "h100"), (f(1024, 32768), f(8, 16, 1024, 1024), f(8, 16, 1024, dtype="int32"))
    for loss in (by_log_softmax, by_logsumexp):
        one, other = (search(form(loss), args, machine).fastest.time for form in (carried, stacked))
        assert one == pytest.approx(other, rel=0.01)


def test_values_reduced_inside_are_unused_and_their_gradients_not_summed() -> None:
    graph = capture(lambda x: jax.nn.logsumexp(x, -1), f(16, 32)).graph
    (node,) = (n for n in graph.nodes if n.body is not None)
    assert node.body is not None
    found = {c.results: c for c in choices(node.body) if c.operands == (partitioned(1),)}
    assert all(not r.users for r in found[UNUSED,].reduced if r.kind == "sum")


def test_values_reduced_inside_are_added_to_partial_sums() -> None:
    """The log of a sum over all classes, whole on every device, and the one class that a device has or has not."""

    def loss(x: Any, y: Any) -> Any:
        return jnp.log(jnp.exp(x).sum(-1)) - jnp.take_along_axis(x, y[:, None], -1)[:, 0]

    graph = capture(loss, f(16, 32), f(16, dtype="int32")).graph
    bodies = [n.body for n in graph.nodes if n.body is not None]
    assert any(PARTIAL in c.results and partitioned(1) in c.operands for body in bodies for c in choices(body))


@pytest.mark.parametrize("form", ["logsumexp", "vmap", "stacked", *by_hand("one-hot", "carried", "averaged")])
def test_plans_with_contributed_sums_compute_what_the_function_does(form: str) -> None:
    """Values and gradients in float64, and the collectives that are predicted: the fastest plan's, and some drawn at random."""
    fn, steps = {
        "logsumexp": (by_logsumexp, ()), "vmap": (by_vmap, ()), "one-hot": (by_one_hot, ()),
        "carried": (carried(by_logsumexp), (4,)), "stacked": (stacked(by_vmap), (4,)), "averaged": (averaged, (4,)),
    }[form]  # fmt: skip
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        args = (
            jnp.asarray(rng.normal(size=(8, 64))),
            jnp.asarray(rng.normal(size=(*steps, 32, 8))),
            jnp.asarray(rng.integers(-80, 80, (*steps, 32)), jnp.int32),
        )
        wanted = jax.value_and_grad(fn)(*args)
        captured = capture(fn, *args)
        assembled = assemble(captured.graph, captured.differentiated, EIGHT, Training())
        searched = Search(captured.graph, captured.differentiated, EIGHT, Training())
        drawn = (assembled.assignment(random_point(assembled, np.random.default_rng(seed))) for seed in (0, *by_hand(1)))
        for candidate in (searched.fastest, *(Candidate(0.0, 0.0, a) for a in drawn)):
            plan = Plan(PlanFamily(fn, captured, searched, 0.0), candidate)
            found, checked = stepped(plan, *args)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), found, wanted)
            assert checked.agrees()


def test_a_maximum_may_be_transformed_before_its_gradient_stops() -> None:
    """The classes of a soft-max may be divided, whatever is done to its maximum before it is subtracted."""
    between = {
        "nothing": lambda m: m, "transpose": lambda m: m.T, "neg": lambda m: -m, "scale": lambda m: 2.0 * m,
        "exp": lambda m: jnp.exp(m), "reshape": lambda m: m.reshape(m.shape[::-1]), "pad": lambda m: jnp.pad(m, 1)[1:-1, 1:-1],
        "sort": lambda m: jnp.sort(m), "select": lambda m: jnp.where(m > 0, m, 0.0), "cumsum": lambda m: jnp.cumsum(m),
    }  # fmt: skip

    def shifted(x: Any, fn: Callable[..., Any], stop: Callable[..., Any]) -> Any:
        return jnp.exp(x - stop(fn(x.max(-1, keepdims=True)).sum()))

    for name, fn in between.items():
        for stop, reduces in ((jax.lax.stop_gradient, True), (lambda m: m, False)):
            body = close(jax.make_jaxpr(partial(shifted, fn=fn, stop=stop))(f(4, 8)))
            found = [c for c in choices(body) if c.operands == (partitioned(1),)]
            assert any(r.kind == "max" for c in found for r in c.reduced) == reduces, name


def test_two_sums_are_divided_each_in_its_own_way() -> None:
    body = close(jax.make_jaxpr(lambda x, y: x.mean() + y.mean())(f(4, 8), f(4, 8)))
    found = {c.operands for c in choices(body)}
    assert found >= {(partitioned(i), partitioned(j)) for i in (0, 1) for j in (0, 1)}


ONE = {
    "exp": jnp.exp,
    "tanh": jnp.tanh,
    "neg": jnp.negative,
    "scale": lambda x: 0.5 * x,
    "shift": lambda x: x + 1.0,
    "square": jnp.square,
    "logsumexp": lambda x: jax.nn.logsumexp(x, -1, keepdims=True) if x.ndim else x,
    "rows": lambda x: x.sum(-1, keepdims=True) if x.ndim else x,
    "columns": lambda x: x.mean(0, keepdims=True) if x.ndim else x,
    "norm": lambda x: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) if x.ndim else x,
    "total": lambda x: x.sum() if x.ndim else x,
    "softmax": lambda x: jax.nn.softmax(x) if x.ndim else x,
    "centre": lambda x: x - x.mean(-1, keepdims=True) if x.ndim else x,
}
TWO = {"add": jnp.add, "mul": jnp.multiply, "sub": jnp.subtract}


def drawn(seed: int) -> Callable[..., Any]:
    """A loss of a product and of another tensor, by some functions of what was there before."""
    rng = random.Random(seed)
    steps: list[tuple[Any, list[int]]] = []
    for k in range(rng.randint(3, 6)):
        several = rng.random() < 0.35
        steps.append((rng.choice(list((TWO if several else ONE).values())), [rng.randrange(2 + k) for _ in range(1 + several)]))

    def loss(w: Any, x: Any, y: Any) -> Any:
        values = [x @ w, y]
        for fn, of in steps:
            values.append(fn(*(values[k] for k in of)))
        return values[-1].mean() + (values[-2].mean() if seed % 2 else 0.0)

    return loss


def alone(body: Body, constant: Any = None) -> list[EquationCluster]:
    """Every equation an operator of its own."""
    constant = constants(body) if constant is None else constant
    numbers = [k for k, e in enumerate(body.equations) if not (e.results and e.results[0] in constant)]
    return restored(body, constant, [[k] for k in numbers])


def beyond_joining(graph: PCG) -> bool:
    """Whether a plan of single equations does what operators of several never do inside: it gathers what it computed, or puts
    pieces among zeros, which other than here costs memory and work; or it reads one value in two types."""
    types: dict[tuple[int, int], set] = {}
    for node, _ in graph.walk():
        before = node.operands[0].type if node.operands else ()
        if node.kind in ("combine", "combine_replicate") and node.operands[0].node.kind != "input":
            return True
        if node.kind == "contribute" and any(s.kind == "P" != t.kind for s, t in zip(before, node.types[0], strict=True)):
            return True
        for v in node.operands if node.kind not in UNCHANGED else ():
            split = tuple(s if s.kind == "P" else None for s in v.type)
            while v.node.kind in UNCHANGED:
                v = v.node.operands[0]
            types.setdefault((id(v.node), v.index), set()).add(split)
    return any(len(found) > 1 for found in types.values())


@pytest.mark.parametrize("block", range(4))
def test_operators_of_several_equations_lose_nothing(block: int) -> None:
    """On a machine whose memory costs nothing, so that what is communicated and multiplied decides."""
    machines = [Machine.grid(1, 2, "h100"), Machine.grid(2, 2, "a100")]
    machines = [replace(m, device=replace(m.device, bandwidth=1e19, launch=1e-15)) for m in machines]
    args = f(512, 2048), f(4096, 512), f(4096, 2048)
    for seed in range(50 * block, 50 * block + (12 if CI else 50)):
        loss, machine = drawn(seed), machines[seed % 2]
        joined, single = capture(loss, *args), capture(loss, *args, clustering=alone)
        ours = Search(joined.graph, joined.differentiated, machine, Training()).fastest
        search = Search(single.graph, single.differentiated, machine, Training())
        if ours.time > 1.01 * search.fastest.time:
            assembled, point = search.fastest_point
            assert beyond_joining(parallelize(single.graph, assembled.assignment(point))), seed


STEPS = 4


def vmapped(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, xs, ys: jax.vmap(loss, (None, 0, 0))(w, xs, ys).sum()


def mapped(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, xs, ys: jax.lax.map(lambda batch: loss(w, *batch), (xs, ys)).sum()


def in_turn(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, xs, ys: sum(loss(w, xs[i], ys[i]) for i in range(STEPS))


def indexed(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, xs, ys: jax.lax.fori_loop(0, STEPS, lambda i, total: total + loss(w, xs[i], ys[i]), 0.0)


def nested(loss: Callable[..., Any]) -> Callable[..., Any]:
    def outer(total: Any, batches: Any) -> Any:
        return jax.lax.scan(lambda total, batch: (total + loss(batches[0], *batch), None), total, batches[1:])[0], None

    def summed(w: Any, xs: Any, ys: Any) -> Any:
        halves = (x.reshape(2, STEPS // 2, *x.shape[1:]) for x in (xs, ys))
        return jax.lax.scan(lambda total, both: outer(total, (w, *both)), 0.0, tuple(halves))[0]

    return summed


MICRO_BATCHES = {"vmap": vmapped, "map": mapped, "carried": carried, "in turn": in_turn, "indexed": indexed, "nested": nested}


def squared(w: Any, x: Any, y: Any) -> Any:
    return ((jnp.tanh(x @ w) - y) ** 2).mean()


@pytest.mark.parametrize("seed", range(fewer(12)))
def test_micro_batches_send_and_multiply_the_same_in_every_form(seed: int) -> None:
    """Where launches, memory and latency cost nothing, no form is slower than another: no gradient is reduced, no weight gathered
    and no batch kept whole in every step."""
    machine = (Machine.grid(1, 2, "h100"), Machine.grid(2, 2, "a100"), Machine.grid(1, 8, "a100"))[seed % 3]
    levels = tuple(replace(level, latency=1e-15, protocols=()) for level in machine.levels)
    machine = replace(machine, levels=levels, device=replace(machine.device, bandwidth=1e19, launch=1e-15))
    samples, width, classes = ((4096, 512, 2048), (256, 2048, 4096), (1024, 1024, 1024))[seed // 3 % 3]
    args = f(width, classes), f(STEPS, samples, width), f(STEPS, samples, classes)
    loss = drawn(seed) if seed else squared
    times = {name: search(form(loss), args, machine).fastest.time for name, form in MICRO_BATCHES.items()}
    assert max(times.values()) <= 1.01 * min(times.values()) + 1e-9, times


@pytest.mark.parametrize("machine", [Machine.grid(1, 8, "a100"), Machine.preset("dgx-h100-4x8")], ids=["8", "32"])
def test_steps_of_a_loop_cost_their_launches_more(machine: Machine) -> None:
    """Two operators and a sum of what they leave: each is launched there and back in every step, and the weight is read again.

    What the derivative of the step reads, and its result, are rows that each step writes.
    """
    args = f(1024, 1024), f(STEPS, 8192, 1024), f(STEPS, 8192, 1024)
    best, *others = (search(form(squared), args, machine).fastest.time for form in (vmapped, mapped, carried, indexed))
    launches = (STEPS - 1) * 2 * 2 + 3 + STEPS * 4
    weight = (STEPS - 1) * 3 * args[0].size * 4 / machine.device.bandwidth
    assert max(others) <= 1.02 * best + launches * machine.device.launch + weight
