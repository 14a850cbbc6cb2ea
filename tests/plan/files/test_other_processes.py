"""Plans that are saved by one process and loaded by another, where functions have other ids and sets another order."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import unity


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


MACHINE = unity.Machine.grid(1, 2, "a100")


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))


def chain(w, x, f):
    """A chain of two products, which rules join, between calls of a function with a rule for its derivative."""
    return f(f(x) @ w["a"] @ w["b"])


WEIGHTS = {"a": struct(16, 64), "b": struct(64, 16)}
STACKED = {name: struct(4, *w.shape) for name, w in WEIGHTS.items()}
CASES = {
    "relu": (lambda w, x: jnp.sum(chain(w, x, jax.nn.relu) ** 2), WEIGHTS),
    "a rule of the user's": (lambda w, x: jnp.sum(chain(w, x, clipped) ** 2), WEIGHTS),
    "both": (lambda w, x: jnp.sum(chain(w, chain(w, x, jax.nn.relu), clipped) ** 2), WEIGHTS),
    "inside of a scan": (lambda w, x: jnp.sum(jax.lax.scan(lambda x, w: (chain(w, x, jax.nn.silu), None), x, w)[0]), STACKED),
    "written out": (lambda w, x: jnp.sum(chain(w, chain(w, chain(w, x, jax.nn.relu), jax.nn.relu), jax.nn.relu)), WEIGHTS),
}
CASES = {name: CASES[name] for name in [*CASES][1:4:2]} if "CI" in os.environ else CASES  # `ci_cases` is not on the other's path
X = struct(64, 16)


def values(plan, name):
    rng = np.random.default_rng(0)
    args = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) / 4, s.dtype), (CASES[name][1], X))
    value, gradient = jax.value_and_grad(plan)(*plan.shard(*args))
    return [float(value), *(float(jnp.sum(g * jnp.sin(jnp.arange(g.size).reshape(g.shape)))) for g in jax.tree.leaves(gradient))]


def loaded(folder):
    """Print what the other process sees of every plan: its time, its rules, its values."""
    for k, (name, (fn, weights)) in enumerate(CASES.items()):
        plan = unity.load(Path(folder) / f"{k}.json", fn, weights, X)
        plan.program.check_derivation()
        print(repr((name, plan.time, repr(plan.program.rewriting), values(plan, name))))


def test_rewritten_plans_are_loaded_by_another_process(tmp_path):
    lines = []
    for k, (name, (fn, weights)) in enumerate(CASES.items()):
        plan = unity.optimize(fn, weights, X, machine=MACHINE, budget=20, progress=False)
        assert plan.program.rewriting, "the plan is rewritten, or the test shows nothing"
        plan.files.save(tmp_path / f"{k}.json")
        lines.append(repr((name, plan.time, repr(plan.program.rewriting), values(plan, name))))
    code = f"from test_other_processes import loaded; loaded({str(tmp_path)!r})"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == lines
