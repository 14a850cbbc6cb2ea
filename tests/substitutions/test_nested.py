"""Programs inside of scans and remats are rewritten like the rest: what is found, what runs, what is checked and kept in files."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models
from ci_cases import by_hand
from hidden_state import doubled

import unity
from unity.base.errors import DerivationError, PlanError
from unity.pcg.capture.capture import capture
from unity.pcg.propagation.nested.scan_programs import programs, with_inside
from unity.plan.files.plan_file import sealed
from unity.search.joint.nested import program
from unity.substitutions.language.derivation import Derivation, NestedDerivation
from unity.substitutions.language.library import Library
from unity.transforms.branches.branching import Forked
from unity.verify.derivations.replay import check

MACHINE = unity.Machine.grid(1, 8, "v100")


def f(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def layer(x, p):
    """Two products that are cheaper as one, of the product of the weights."""
    return jnp.tanh(x @ p["a"] @ p["b"])


def scanned(params, x):
    return jnp.mean(jax.lax.scan(lambda c, p: (layer(c, p), None), x, params)[0] ** 2)


def checkpointed(params, x):
    for p in params:
        x = jax.checkpoint(layer)(x, p)
    return jnp.mean(x**2)


def scanned_remat(params, x):
    return jnp.mean(jax.lax.scan(lambda c, p: (jax.checkpoint(layer)(c, p), None), x, params)[0] ** 2)


ONE = {"a": f(16, 256), "b": f(256, 16)}
STACKED = {"a": f(3, 16, 256), "b": f(3, 256, 16)}
CASES = {
    "scan": (scanned, (STACKED, f(65536, 16))),
    "remat": (checkpointed, ([ONE] * 3, f(65536, 16))),
    "scan of a remat": (scanned_remat, (STACKED, f(65536, 16))),
}
EACH = pytest.mark.parametrize(("fn", "args"), CASES.values(), ids=CASES)

pytestmark = pytest.mark.usefixtures("own_cache")


def plan(fn, args, **options):
    return unity.optimize(fn, *args, machine=MACHINE, progress=False, **options)


@EACH
def test_what_is_inside_is_rewritten_and_computes_the_same(fn, args):
    found = plan(fn, args)
    assert found.program.rewriting
    ((rule, times),) = found.program.rewriting.applied
    assert times == 1
    assert str(rule) == "regroup-products"
    assert len(found.program.check_derivation()) == 1  # equal programs inside are one
    assert found.time < plan(fn, args, search="captured").time
    rng = np.random.default_rng(0)
    given = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), s.dtype) / 4, args)
    wanted = jax.jit(jax.value_and_grad(fn))(*given)
    for a, b in zip(jax.tree.leaves(jax.jit(jax.value_and_grad(found))(*given)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@EACH
def test_operators_inside_keep_the_users_lines(fn, args):
    found = plan(fn, args)
    sources = {n.source for n, _ in found.program.serial.walk() if n.kind == "dot_general"}
    assert len(sources) == 1
    assert next(iter(sources)).startswith(__file__)


@EACH
def test_files_keep_what_was_done_inside_and_refuse_what_does_not_replay(fn, args, tmp_path):
    path = tmp_path / "plan.json"
    found = plan(fn, args)
    found.files.save(path)
    again = unity.load(path, fn, *args)
    assert again.program.serial.key == found.program.serial.key
    assert again.program.check_derivation() == found.program.check_derivation()
    data = json.loads(path.read_text())
    (rewriting,) = data["transformations"]
    derivation = rewriting["derivation"]
    ((key, one),) = derivation["inside"].items()
    for changed, message in [
        ({}, "does not lead"),
        ({"0" * 32: one}, "not in the programs"),
        ({key: {**one, "to": key}}, "not in the programs"),
        ({key: {**one, "derivation": {"steps": [], "inside": {}}}}, "does not lead"),
        ({key: 3}, "damaged"),
    ]:
        wrong = {**rewriting, "derivation": {**derivation, "inside": changed}}
        path.write_text(json.dumps(sealed({**data, "transformations": [wrong]})))
        with pytest.raises(PlanError, match=message):
            unity.load(path, fn, *args)


def test_what_another_program_computes_may_not_take_its_place():
    """A derivation without steps, from one program inside to another that is no rewriting of it."""
    before, after = (capture(fn, *CASES["scan"][1]).body for fn in (scanned, lambda p, x: scanned(p, x * 1)))
    assert programs(before).keys() == programs(after).keys()

    def other(params, x):
        return jnp.mean(jax.lax.scan(lambda c, p: (jnp.sin(c @ p["a"] @ p["b"]), None), x, params)[0] ** 2)

    changed = capture(other, *CASES["scan"][1]).body
    (old,), (new,) = programs(before), programs(changed)
    with pytest.raises(DerivationError, match="does not lead"):
        check(before, changed, Derivation((), {old: NestedDerivation(new, Derivation())}), Library(()))


def test_equal_programs_inside_are_one_and_count_as_often_as_they_run():
    captured = capture(checkpointed, *CASES["remat"][1])
    whole = program(captured.body, captured.differentiated)
    assert [(len(one.segments), times) for one, times in whole.walk()] == [(1, 1), (1, 3)]
    captured = capture(scanned_remat, *CASES["scan"][1])
    assert [times for _, times in program(captured.body, captured.differentiated).walk()] == [1, 3, 3]


def test_gradients_flow_through_what_a_scan_carries():
    """The carry starts from a constant, and the weights reach it in the first step."""

    def fn(params, x):
        return jnp.sum(jax.lax.scan(lambda c, _: (jnp.tanh(c @ params + x), None), jnp.ones((8, 16)), None, length=4)[0])

    captured = capture(fn, f(16, 16), f(8, 16))
    (inner,) = program(captured.body, captured.differentiated).inside.values()
    (part,) = inner.segments
    flowing = {str(part.body.tensors[part.body.inputs[k]]) for k in part.differentiated}
    assert flowing == {"float32[16,16]", "float32[8,16]"}  # the weights and the carry, and not x
    assert len(part.differentiated) == 2


def test_nothing_inside_is_touched_where_nothing_is_asked_for():
    captured = capture(scanned, *CASES["scan"][1])
    assert with_inside(captured.body, {}) is captured.body
    whole = program(captured.body, captured.differentiated)
    assert programs(whole.with_segments({})).keys() == programs(captured.body).keys()


@pytest.mark.parametrize("name", ["lstm", *by_hand("gpt_scanned")])
def test_models_with_scans_compute_the_same(name):
    model = getattr(small_models, name)()
    with jax.enable_x64(True):
        found = unity.optimize(model.loss, model.params, model.batch, machine=MACHINE, progress=False, budget=40)
        found.program.check_derivation()
        assert found.time <= plan(model.loss, (model.params, model.batch), search="captured").time
        given = small_models.arrays((model.params, model.batch))
        wanted = jax.jit(jax.value_and_grad(model.loss))(*given)
        for a, b in zip(jax.tree.leaves(jax.jit(jax.value_and_grad(found))(*given)), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("factors", "searched"), [((1.0, 1.0), 1), ((1.0, 3.0), 0)])
def test_equal_programs_are_rewritten_unless_their_derivatives_hide_what_differs(factors, searched):
    own = {factor: doubled(factor) for factor in factors}

    def run(x, double):
        return jax.lax.scan(lambda c, _: (double(jnp.sin(c)), None), x, None, length=3)[0]

    def loss(x):
        return run(run(x, own[factors[0]]), own[factors[1]]).sum()

    captured = capture(loss, f(4, 4))
    body = captured.body
    assert len(program(body, {0}).inside) == len(Forked(captured).repeated) == searched
    (old,) = programs(body).values()
    new = replace(old, equations=old.equations[:1], outputs=old.equations[0].results)
    replaced = [e.params["jaxpr"] is new for e in with_inside(body, {old.key: new}).equations if e.name == "scan"]
    assert replaced == [bool(searched)] * 2
