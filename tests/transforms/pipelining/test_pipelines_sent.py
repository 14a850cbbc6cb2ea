"""Messages of pipelines whose carries are not all read at the end, or have no gradient: as predicted, and none in vain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.lax import stop_gradient

import unity
from unity.base.errors import InfeasibleError
from unity.pcg.ir.graph import PIPELINE
from unity.pcg.ir.payloads import Pipeline

TREE = unity.Machine.grid(2, 4)
LAYERS, BATCH, WIDTH = 4, 16, 8


def layer(h, w):
    return h + jnp.tanh(h @ w)


def run(w, x):
    return lax.scan(lambda h, own: (layer(h, own), None), x, w)[0]


def mixture(w, e, x, y):
    """The result is a mixture of all layers' outputs, of which the last is not read."""

    def step(carry, own):
        h = layer(carry[0], own)
        return (h, carry[1] + 0.1 * h), None

    return ((lax.scan(step, (x @ e, y), w)[0][1] - y) ** 2).mean()


def mask_that_is_not_read(w, e, x, y):
    def step(carry, own):
        return (layer(carry[0], own) * (carry[1] > 0), carry[1] * 2 - 1), None

    return ((lax.scan(step, (x @ e, (y > 0).astype(jnp.int32)), w)[0][0] - y) ** 2).mean()


def stopped_at_the_end(w, e, x, y):
    def step(carry, own):
        h = layer(carry[0], own)
        return (h, carry[1] + h), None

    h, o = lax.scan(step, (x @ e, y), w)[0]
    return ((o - stop_gradient(h)) ** 2).mean()


def stopped_inside(w, e, x, y):
    """What the layers read beside their carry has a gradient, but not through them."""
    z = jnp.tanh(x @ e)
    return (lax.scan(lambda h, own: (layer(h, own) + stop_gradient(z), None), y, w)[0] ** 2).mean() + z.mean()


def carried_for_nothing_but_a_metric(w, e, x, y):
    def step(carry, own):
        h = layer(carry[0], own)
        return (h, carry[1] + h), None

    h, o = lax.scan(step, (x @ e, y), w)[0]
    return ((h - y) ** 2).mean() + 0.0 * stop_gradient(o).sum()


def frozen(w, e, x, y):
    """The layers after trained ones are frozen, and read what has a gradient elsewhere."""
    z = jnp.tanh(x @ e)
    return ((run(w, z) - stop_gradient(run(0.9 * w, z))) ** 2).mean() + z.mean()


def arguments():
    rng = np.random.default_rng(0)
    shapes = (LAYERS, WIDTH, WIDTH), (WIDTH, WIDTH), (BATCH, WIDTH), (BATCH, WIDTH)
    return tuple(jnp.asarray(rng.normal(size=s) / 3, jnp.float32) for s in shapes)


def planned(fn, schedule, argnums=(0, 1)):
    shape = unity.PipelineShape(2, 4, schedule)
    return unity.optimize(fn, *arguments(), argnums=argnums, machine=TREE, pipeline=shape, search="captured", progress=False)


def pipeline_of(plan):
    (node,) = [n for n in plan.program.pcg.nodes if n.kind == PIPELINE]
    return node


FUNCTIONS = [mixture, mask_that_is_not_read, stopped_at_the_end, stopped_inside, carried_for_nothing_but_a_metric, frozen]


@pytest.mark.parametrize("fn", FUNCTIONS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_is_sent_was_predicted_and_the_gradient_is_the_function_s(fn, schedule):
    plan, args = planned(fn, schedule), arguments()
    for gradient in (True, False):
        assert [(x.kind, x.compiled) for x in plan.check(gradient=gradient).lines if x.predicted != x.compiled] == []
    found, wanted = (jax.jit(jax.value_and_grad(f, (0, 1)))(*args) for f in (plan, fn))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, wanted)


def test_a_result_that_nothing_reads_is_not_sent_home():
    assert pipeline_of(planned(mixture, "gpipe")).of(Pipeline).leaving == (1,)
    assert pipeline_of(planned(mixture, "1f1b")).of(Pipeline).leaving == (1,)  # without a gradient it goes by GPipe's, too
    assert pipeline_of(planned(stopped_at_the_end, "gpipe")).of(Pipeline).leaving is None


def test_a_gradient_that_is_zero_is_not_sent():
    node = pipeline_of(planned(stopped_inside, "gpipe"))
    assert node.of(Pipeline).read == 1
    assert node.of(Pipeline).inactive == (0,)


def test_frozen_layers_have_no_backward_pass_to_alternate_with():
    """Of a student and its teacher the student is the pipeline by 1F1B; frozen layers alone go by GPipe's schedule."""

    def head(w, e, x, y):
        return ((run(w, x) @ e - y) ** 2).mean()

    node = pipeline_of(planned(frozen, "1f1b"))
    assert not [v for v in node.operands if v.node.kind == "mul"]  # the teacher's weights are scaled
    with pytest.raises(InfeasibleError, match="no gradient goes back through these steps"):
        planned(head, "1f1b", argnums=1)
    plan = planned(head, None, argnums=1)
    assert plan.program.pipelining is not None
    assert "GPipe" in str(plan.program.pipelining)
    assert "no gradient goes back" in plan.program.pipelining.note
