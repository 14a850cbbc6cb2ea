"""Laws of all transformations: a plan file has them, they are applied again from it, and a check refuses another program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import unlike_models

import unity
from benchmarks import forked_layers
from unity.base.errors import DerivationError
from unity.substitutions.language.axioms import default_library
from unity.transforms.transformation import Transformation, TransformationSource

pytestmark = pytest.mark.usefixtures("own_cache")

TREE = unity.Machine.grid(2, 4, "v100")


def f(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def chained(params, x):
    return jnp.mean((x @ params["a"] @ params["b"]) ** 2)


def joined(params, x):
    return jnp.sum(jnp.tanh(x @ jnp.concatenate(params, 1)))


def recurrent(params, x):
    return jnp.mean(jax.lax.scan(lambda h, x: (jnp.tanh(x @ params["x"] + h @ params["h"]), None), x[0], x)[0] ** 2)


CASES = {  # the kinds of transformations: the function, its arguments, and options
    ("rewriting",): (chained, ({"a": f(16, 64), "b": f(64, 8)}, f(4096, 16)), {}),
    ("loop rules",): (recurrent, ({"x": f(64, 64), "h": f(64, 64)}, f(16, 32, 64)), {}),
    ("micro-batches",): (chained, ({"a": f(16, 64), "b": f(64, 8)}, f(4096, 16)), {"micro_batches": 4, "budget": 0}),
    ("padding",): (chained, ({"a": f(16, 1023), "b": f(1023, 8)}, f(65535, 16)), {"padding": True, "pack": True, "budget": 0}),
    ("weights",): (joined, ([f(8, 8)] * 2, f(8, 8)), {"pack": True, "budget": 0}),
    ("pipeline", "branches"): (
        forked_layers.loss,
        (forked_layers.weights(), forked_layers.batch()),
        {"branch_groups": 2, "pipeline": unity.PipelineShape(2, 4), "budget": 0},
    ),
    ("pipeline",): (
        unlike_models.mlp,
        unlike_models.mlp_arguments(),
        {"pipeline": unity.PipelineShape(2, 4), "pack": True, "budget": 0},
    ),
}


@pytest.mark.parametrize("kinds", CASES)
def test_transformations_are_applied_again_from_a_file_that_has_all_of_them(kinds: tuple[str, ...], tmp_path: Path) -> None:
    fn, args, options = CASES[kinds]
    plan, path = unity.optimize(fn, *args, machine=TREE, progress=False, **options), tmp_path / "plan.json"
    assert tuple(t.kind for t in plan.program.transformations) == kinds
    plan.files.save(path)
    again = unity.load(path, fn, *args)
    assert [(t.record, str(t), t.packing) for t in again.program.transformations] == [
        (t.record, str(t), t.packing) for t in plan.program.transformations
    ]
    assert again.program.pcg.key == plan.program.pcg.key
    again.files.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kinds", CASES)
def test_each_leads_from_its_program_to_the_next_and_to_no_other(kinds: tuple[str, ...]) -> None:
    fn, args, options = CASES[kinds]
    plan = unity.optimize(fn, *args, machine=TREE, progress=False, **options)
    program, earlier = plan.program.family.original, ()
    for t in plan.program.transformations:
        assert t.before.graph.key == program.graph.key
        source = TransformationSource(plan.program.family.original, earlier, TREE, default_library)
        assert t.record.apply(source).after.graph.key == t.after.graph.key
        t.check()
        with pytest.raises(DerivationError):
            replace(t, after=t.before).check()
        program, earlier = t.after, (*earlier, t)
    assert program is plan.program.family.captured


def kinds_of(base: type) -> list[type]:
    return [base, *(kind for below in base.__subclasses__() for kind in kinds_of(below))]


@pytest.mark.parametrize("kind", kinds_of(Transformation))
def test_a_transformation_prints_in_one_line_not_as_its_programs(kind: type) -> None:
    assert kind.__repr__ is Transformation.__repr__
