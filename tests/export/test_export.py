"""An exported plan equals the plan: the same values and gradients to the last bit, the same collectives, in readable plain JAX."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import host_functions
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpointed_models import saving
from ci_cases import one_in
from conftest import FLAGS
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layered_model import towers, towers_arguments
from operator_cases import CASES
from precision import in_64_bits
from slow_machines import slow
from small_models import MODELS, Small, arrays, f, gpt, i, joint_attention, random_point

import unity
from unity.exec.compiled.hlo import collectives
from unity.export import ExportError, write
from unity.export.nested import NESTED
from unity.export.primitives.public_names import FUNCTION_PRINTERS, PUBLIC_MODULES
from unity.export.primitives.table import PRIMITIVES
from unity.export.source_code import Code
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.operators.promised_reads import PROMISED
from unity.pcg.operators.table import TABLE
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.search.cost.assembly import assemble
from unity.search.cost.cost import Training
from unity.search.session import Candidate, Search

PAIR, FOUR = Machine.grid(1, 2, "a100"), Machine.grid(2, 2, "a100")


@pytest.fixture(autouse=True)
def _in_64_bits() -> Iterator[None]:
    with in_64_bits():
        yield


def planned(model: Small, machine: Machine, seed: int = 0) -> Plan:
    """Return a plan with a random strategy."""
    captured = capture(model.loss, model.params, model.batch)
    assembled = assemble(captured.graph, captured.differentiated, machine, Training())
    point = random_point(assembled, np.random.default_rng(seed))
    search = Search(captured.graph, captured.differentiated, machine, Training())
    return Plan(PlanFamily(model.loss, captured, search, 0.0), Candidate(0.0, 0.0, assembled.assignment(point)))


def names_of_file(path: Path) -> dict[str, Any]:
    """Run a file, and return its names."""
    names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names


def step(fn: Callable[..., Any], params: Any, batch: Any) -> tuple[Any, Counter]:
    """Return the value and the gradients of a compiled step, and its collectives."""
    compiled = jax.jit(jax.value_and_grad(fn)).lower(params, batch).compile()
    found = Counter((c.kind, c.elements, c.count) for c in collectives(compiled.as_text() or ""))
    return jax.tree.map(np.asarray, compiled(params, batch)), found


def assert_agrees(plan: Plan, path: Path, params: Any, batch: Any) -> None:
    """Check that an exported file computes the plan's values and has its collectives."""
    names = names_of_file(path)
    wanted, predicted = step(plan, *plan.shard(params, batch))
    got, found = step(names["fn"], *jax.device_put((params, batch), names["in_shardings"]))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert found == predicted


def assert_well_written(path: Path, own: Collection[str] = ()) -> None:
    """Check that a file imports JAX, numpy and the given modules only, and passes a formatter and a linter."""
    tree = ast.parse(path.read_text())
    modules = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    modules |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {m.partition(".")[0] for m in modules} <= {"jax", "numpy", "functools", "pathlib", "re", "typing", *own}
    assert max(map(len, path.read_text().splitlines())) <= 120
    ruff = [sys.executable, "-m", "ruff"]
    how = ["--isolated", "--line-length", "120"]
    subprocess.run([*ruff, "format", "--check", *how, path], check=True, capture_output=True)
    subprocess.run([*ruff, "check", "--select", "E,F,W,I,B,UP", *how, path], check=True, capture_output=True)


def mlp() -> Small:
    def loss(p: Any, batch: Any) -> Any:
        for one in p:
            batch = jnp.tanh(batch @ one["w"] + one["b"])
        return (batch**2).sum()

    return Small(loss, [{"w": f(16, 16), "b": f(16)} for _ in range(4)], f(8, 16))


def dlrm() -> Small:
    def loss(p: Any, batch: Any) -> Any:
        looked_up = [table[batch["ids"][:, k]] for k, table in enumerate(p["tables"])]
        dense = jax.nn.relu(batch["x"] @ p["bottom"])
        z = jnp.stack([dense, *looked_up], 1)
        pairs = jnp.einsum("bif,bjf->bij", z, z).reshape(z.shape[0], -1)
        logits = jnp.concatenate([dense, pairs], 1) @ p["top"]
        return jnp.logaddexp(logits, 0.0).mean()

    params = {"tables": [f(16, 8), f(24, 8)], "bottom": f(4, 8), "top": f(17, 1)}
    return Small(loss, params, {"x": f(8, 4), "ids": i(8, 2)})


EVERY = {**MODELS, "gpt": partial(gpt, d=16, s=8), "mlp": mlp, "dlrm": dlrm, "joint attention": joint_attention}


QUICK = ("cnn", "dlrm", "mlp")


@pytest.mark.parametrize("name", one_in(2, sorted(EVERY)))
def test_the_file_computes_what_the_plan_computes(name: str, tmp_path: Path) -> None:
    model = EVERY[name]()
    plan, path = planned(model, FOUR if name in QUICK else PAIR), tmp_path / "exported.py"
    plan.files.export(path)
    assert_well_written(path)
    assert_agrees(plan, path, arrays(model.params), arrays(model.batch))


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x * 2.0


clipped.defvjp(lambda x: (x * 2.0, x > 0.5), lambda big, g: (jnp.where(big, 0.0, g * 3.0),))


def special(p: Any, batch: Any) -> Any:
    """A loss with custom rules, branches, loops, random numbers, closed-over arrays, and a checkpoint with a policy."""
    x = clipped(jax.nn.relu(batch["x"] @ p["w"]))
    x = lax.cond(batch["n"][0] > 3, jnp.sin, lambda y: y * 0.5, x)
    x = lax.switch(batch["n"][1], [jnp.cos, jnp.tanh, lambda y: y + 1.0], x)
    size = lax.stop_gradient(jnp.abs(x).sum())
    halvings, _ = lax.while_loop(lambda c: c[1] > 1.0, lambda c: (c[0] + 1.0, c[1] / 2.0), (0.0, size))
    keep = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), batch["n"][0]), 0.5, x.shape)
    x = jnp.where(keep, x, 0.0) @ TABLE_OF_NUMBERS + SHORT
    saved = jax.checkpoint_policies.dots_saveable
    x = jax.checkpoint(lambda x, w: jnp.sin(jnp.tanh(x @ w)) @ w, policy=saved)(x, p["w"].T @ p["w"])
    x, _ = lax.scan(lambda h, row: (h * 0.5 + jnp.sin(row), None), x[0], x, reverse=True, unroll=2)
    return (x * halvings).sum() + lax.fori_loop(0, 3, lambda k, total: total + k * x.mean(), 0.0)


TABLE_OF_NUMBERS = np.arange(1024.0).reshape(32, 32) / 1024
SHORT = np.linspace(0.0, 1.0, 32)


@pytest.mark.parametrize("seed", range(2))
def test_nested_programs(seed: int, tmp_path: Path) -> None:
    model = Small(special, {"w": f(8, 32)}, {"x": f(4, 8), "n": i(2)})
    plan, path = planned(model, PAIR, seed), tmp_path / "special.py"
    plan.files.export(path)
    assert_well_written(path)
    assert path.with_suffix(".npz").exists()
    assert_agrees(plan, path, arrays(model.params), arrays(model.batch))


def test_a_pipeline_is_exported(tmp_path: Path) -> None:
    def loss(p: Any, x: Any) -> Any:
        x, _ = lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, p)
        return (x**2).mean()

    model, path = Small(loss, f(4, 16, 16), f(16, 16)), tmp_path / "stages.py"
    plan = unity.optimize(
        loss, model.params, model.batch, machine=FOUR, pipeline=unity.PipelineShape(2, 4, "gpipe"), progress=False
    )
    assert any(n.kind == "pipeline" for n in plan.program.pcg.nodes)
    plan.files.export(path)
    assert_well_written(path)
    assert_agrees(plan, path, arrays(model.params), arrays(model.batch))


def test_a_pipeline_whose_layers_hand_gradients_on_unchanged_is_exported(tmp_path: Path) -> None:
    """A backward pass of two such layers is a loop with a carry that no step changes, which JAX's own functions leave out."""

    def loss(p: Any, x: Any) -> Any:
        return (lax.scan(lambda h, w: (h + w, None), x, p)[0] ** 2).mean()

    model, path = Small(loss, f(4, 16), f(16, 16)), tmp_path / "stages.py"
    options = {"machine": FOUR, "pipeline": unity.PipelineShape(2, 4, "gpipe"), "progress": False, "search": "captured"}
    plan = unity.optimize(loss, model.params, model.batch, **options)
    plan.files.export(path)
    assert_well_written(path)
    assert_agrees(plan, path, arrays(model.params), arrays(model.batch))


def dropped(p: Any, batch: Any) -> Any:
    x, key = batch

    def step(h: Any, own: Any) -> Any:
        w, key = own
        return h + jnp.where(jax.random.bernoulli(key, 0.8, h.shape), jnp.tanh(h @ w) / 0.8, 0), None

    return (lax.scan(step, x, (p, jax.random.split(key, 4)))[0] ** 2).mean()


def masked(p: Any, batch: Any) -> Any:
    x, mask = batch

    def step(h: Any, w: Any) -> Any:
        scores = jnp.where(mask[:, None, :], jnp.einsum("bqd,bkd->bqk", h @ w, h), -1e9)
        return h + jax.nn.softmax(scores) @ h, None

    return (lax.scan(step, x, p)[0] ** 2).mean()


@pytest.mark.parametrize("kind", ["1f1b", "gpipe"])
@pytest.mark.parametrize("loss", [dropped, masked])
def test_pipelines_forward_values_without_gradients(loss: Any, kind: str, tmp_path: Path) -> None:
    """The backward passes receive these values too and do not read them, which makes no difference."""
    params, path = arrays(f(4, 16, 16)), tmp_path / "stages.py"
    batch = (
        (arrays(f(16, 16)), jax.random.key(0))
        if loss is dropped
        else (arrays(f(16, 8, 16)), jnp.arange(128).reshape(16, 8) % 5 > 0)
    )
    plan = unity.optimize(loss, params, batch, machine=FOUR, pipeline=unity.PipelineShape(2, 4, kind), progress=False)
    assert any(n.kind == "pipeline" for n in plan.program.pcg.nodes)
    plan.files.export(path)
    assert_well_written(path)
    placed = plan.shard(params, batch)
    (wanted, sent), (found, sends) = step(plan, *placed), step(names_of_file(path)["fn"], *placed)
    # the file's 1F1B has the gradients of all that it reads, also of a batch of which nobody wants them
    assert sent == sends if kind == "gpipe" else sent.keys() == sends.keys()
    # XLA orders the additions of a loop by the order of its equations, which are others here
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-14), found, wanted)


def test_branches_on_separate_devices(tmp_path: Path) -> None:
    model = Small(towers, *towers_arguments())
    path, options = tmp_path / "apart.py", {"search": "captured", "branch_groups": 2, "progress": False}
    plan = unity.optimize(model.loss, model.params, model.batch, machine=FOUR, **options)
    assert any(n.kind == "branches" for n in plan.program.pcg.nodes)
    plan.files.export(path)
    assert_well_written(path)
    assert_agrees(plan, path, arrays(model.params), arrays(model.batch))


def test_bfloat16_and_a_tree_of_results(tmp_path: Path) -> None:
    half = partial(jax.ShapeDtypeStruct, dtype="bfloat16")

    def fn(p: Any, x: Any) -> Any:
        y = jax.nn.gelu(x @ p) + np.arange(3000, dtype=jnp.bfloat16).reshape(100, 30).sum(0)
        return {"mean": y.mean(), "parts": [y, (y.astype(jnp.float32).max(0), None)]}

    model = Small(fn, half((8, 30)), half((4, 8)))
    plan, path = planned(model, PAIR), tmp_path / "half.py"
    plan.files.export(path)
    assert_well_written(path)
    rng = np.random.default_rng(0)
    p, x = jnp.asarray(rng.normal(size=(8, 30)), jnp.bfloat16), jnp.asarray(rng.normal(size=(4, 8)), jnp.bfloat16)
    jax.tree.map(np.testing.assert_array_equal, names_of_file(path)["fn"](p, x), plan(*plan.shard(p, x)))


def test_equal_layers_are_one_function(tmp_path: Path) -> None:
    plan = planned(mlp(), Machine.grid(1, 1, "a100"))
    path = tmp_path / "layers.py"
    plan.files.export(path)
    functions = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
    program = next(n for n in functions if n.name == "program")
    assert sum(isinstance(n, ast.For) for n in ast.walk(program)) == 1
    assert path.read_text().count("jnp.tanh(") == 2  # three equal layers, and the last, which is squared and summed at once


def test_equal_layers_may_read_one_argument_twice(tmp_path: Path) -> None:
    def loss(p: Any, batch: Any) -> Any:
        x, y = batch
        pairs = [(x, x), (x, y), (y, y)]
        ends = [jnp.tanh((a * m) @ k + (b * n) @ q) for (m, k, n, q), (a, b) in zip(p, pairs, strict=True)]
        return (ends[0] * ends[1] * ends[2]).mean()

    model = Small(loss, [(f(8, 8),) * 4] * 3, (f(8, 8), f(8, 8)))
    plan, path = planned(model, Machine.grid(1, 1, "a100")), tmp_path / "twice.py"
    plan.files.export(path)
    assert "One of 3 equal layers" in path.read_text()
    assert_agrees(plan, path, arrays(model.params), arrays(model.batch))


def test_the_first_of_equal_layers_may_come_last(tmp_path: Path) -> None:
    """Of the equal parts of a step, that of the first gate waits for a product which those of the others do not need."""

    def loss(w: Any, x: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            h, e = carry
            z = jnp.split(w["k"], 4, 1)
            r = [w["r"][:, 16 * k : 16 * k + 16] for k in range(4)]
            i, g, u, o = ((x * m) @ a + (h * n) @ b for m, n, a, b in zip(w["m"][:4], w["m"][4:], z, r, strict=True))
            e = jax.nn.sigmoid(g) * e + jax.nn.sigmoid(i) * jnp.tanh(u)
            return (jax.nn.sigmoid(o) * jnp.tanh(e), e), None

        return (lax.scan(step, (jnp.zeros_like(x[0]),) * 2, x)[0][0] ** 2).mean()

    model = Small(loss, {"k": f(16, 64), "r": f(16, 64), "m": [f(16, 16)] * 8}, f(6, 16, 16))
    plan = unity.optimize(model.loss, model.params, model.batch, machine=slow(FOUR), search="captured", progress=False)
    path = tmp_path / "late.py"
    plan.files.export(path)
    layers = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef) and "equal layers" in ast.dump(n)]
    calls = Counter(
        n.func.id for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    )
    assert layers
    assert all(f"One of {calls[n.name]} equal layers." == ast.get_docstring(n) for n in layers)
    assert_agrees(plan, path, arrays(model.params), arrays(model.batch))


def test_a_reshape_may_leave_the_pieces_of_a_device_as_they_are(tmp_path: Path) -> None:
    """As Keras' depthwise convolutions reshape their filters: a piece of both has one channel by two."""

    def loss(p: Any, x: Any) -> Any:
        filters, dimensions = p["filters"].reshape(3, 3, 1, 8), ("NHWC", "HWIO", "NHWC")
        h = lax.conv_general_dilated(x, filters, (1, 1), "VALID", dimension_numbers=dimensions, feature_group_count=4)
        return jnp.mean((jnp.max(h + p["bias"], (1, 2)) @ p["out"]) ** 2)

    model = Small(loss, {"filters": f(3, 3, 4, 2), "bias": f(8), "out": f(8, 3)}, f(24, 12, 12, 4))
    machine = slow(Machine.grid(2, 4, "a100"))
    plan = unity.optimize(model.loss, model.params, model.batch, machine=machine, search="captured", progress=False)
    path = tmp_path / "depthwise.py"
    plan.files.export(path)
    assert_agrees(plan, path, arrays(model.params), arrays(model.batch))


class Weights(NamedTuple):
    w: Any
    b: Any


def test_arguments_of_user_defined_classes(tmp_path: Path) -> None:
    model = Small(lambda p, x: jnp.tanh(x @ p.w + p.b).sum(), Weights(f(4, 8), f(8)), f(4, 4))
    plan, path = planned(model, PAIR), tmp_path / "own.py"
    plan.files.export(path)
    assert_well_written(path)
    names, (p, x) = names_of_file(path), (arrays(model.params), arrays(model.batch))
    assert "in_shardings" not in names
    there, wanted = names["shardings"]({"p": p, "x": x}), plan.in_shardings
    assert jax.tree.all(jax.tree.map(lambda a, b, c: a.is_equivalent_to(b, c.ndim), (there["p"], there["x"]), wanted, (p, x)))
    np.testing.assert_array_equal(names["fn"](p, x), plan(*plan.shard(p, x)))


def named() -> Small:
    return Small(lambda w, x: (checkpoint_name(jnp.sin(x @ w), "hidden") ** 2).sum(), f(16, 16), f(8, 16))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
    loss: Any
    weights: Weights
    name: str = field(default="train", metadata={"static": True})


def test_results_of_user_defined_classes(tmp_path: Path) -> None:
    def fn(p: Any, x: Any) -> Any:
        loss = (x @ p).sum()
        return loss, {"layers": [Weights(p * 2, None), Metrics(loss, Weights(x, loss), 'the "last"\n')], "no\n": None}

    plan, path = planned(Small(fn, f(8, 8), f(4, 8)), PAIR), tmp_path / "results.py"
    plan.files.export(path)
    assert_well_written(path, own=[__name__])
    assert f"from {Weights.__module__} import Metrics, Weights" in path.read_text()
    p, x = arrays(f(8, 8)), arrays(f(4, 8))
    exported, original = names_of_file(path)["fn"](p, x), plan(*plan.shard(p, x))
    assert jax.tree.structure(exported) == jax.tree.structure(original)
    jax.tree.map(np.testing.assert_array_equal, exported, original)


@jax.tree_util.register_pytree_node_class
class Doubled:
    """A class whose constructor does not take what its trees are made of."""

    def __init__(self, x: Any) -> None:
        self.half = x

    def tree_flatten(self) -> Any:
        return (self.half,), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Any:
        return cls(*children)


def test_a_result_of_another_class_is_refused_by_its_path(tmp_path: Path) -> None:
    class Local(NamedTuple):
        x: Any

    for made, kind in ((Doubled, "a Doubled"), (Local, "a Local")):
        plan = planned(Small(lambda p, x, made=made: ((x @ p).sum(), {"layers": [made(p)]}), f(8, 8), f(4, 8)), PAIR)
        with pytest.raises(ExportError, match=rf"^result\[1\]\['layers'\]\[0\], {kind}, cannot be exported: return dictionaries"):
            plan.files.export(tmp_path / "other.py")


@pytest.mark.parametrize("model", [mlp, named])
def test_the_file_runs_without_unity(model: Callable[[], Small], tmp_path: Path) -> None:
    path = tmp_path / "alone.py"
    planned(model(), PAIR).files.export(path)
    assert_well_written(path)
    code = f"import runpy, sys; sys.modules['unity'] = None; runpy.run_path({str(path)!r}, run_name='__main__')"
    env = {**os.environ, "XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ""}
    run = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "()"


def test_every_operator_of_the_table_is_exported_or_known_to_be_refused() -> None:
    refused = {"constrain", "kernel", "log2", "one_minus_square", "polynomial", "sharding_constraint"}
    public = {p.name for module in PUBLIC_MODULES.values() for p in vars(module).values() if isinstance(p, core.Primitive)}
    assert refused <= set(TABLE)
    runs_as_others = {PROMISED}  # its local program is written in JAX's own primitives
    assert set(TABLE) - {*runs_as_others, *PRIMITIVES, *FUNCTION_PRINTERS, *NESTED, *(public - refused)} == refused


def test_unsupported_operators_are_refused_with_their_name_and_line(tmp_path: Path) -> None:
    def loss(w: Any, x: Any) -> Any:
        y = jax.pure_callback(lambda x: 2 * x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return w.sum() + y.sum()

    with pytest.raises(ExportError, match=r"test_export\.py:\d+.*pure_callback"):
        write(planned(Small(loss, f(4, 4), f(4)), PAIR), tmp_path / "never.py")
    assert not list(tmp_path.iterdir())


OPERATORS = (  # regressions
    "dot_general, batch", "dynamic_slice in dim", "random integers", "random, vmapped keys", "random split, vmapped",
    "random fold_in, vmapped", "random seed", "rng_bit_generator", "contrastive", "reduce of two", "random gamma", "while, vmapped",
    "scan, of no steps", "frexp and ldexp", "pooling of complex numbers",
)  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_written_faithfully(name: str, tmp_path: Path) -> None:
    fn, operands = CASES[name]
    args = [make() if callable(make) else make for make in operands]
    captured, without = capture(fn, *args, argnums=()), Training(False)
    assembled = assemble(captured.graph, (), PAIR, without)
    point = random_point(assembled, np.random.default_rng(0))
    search = Search(captured.graph, frozenset(), PAIR, without)
    write(Plan(PlanFamily(fn, captured, search, 0.0), Candidate(0.0, 0.0, assembled.assignment(point))), tmp_path / "operator.py")
    assert_well_written(tmp_path / "operator.py")


def test_operations_on_constants_stay_in_the_program(tmp_path: Path) -> None:
    model = Small(lambda w, x: w[jnp.array([0, 1, 2]) + 1].sum() + x.sum(), f(4, 4), f(4))
    planned(model, PAIR).files.export(tmp_path / "constants.py")
    assert_well_written(tmp_path / "constants.py")


def test_a_file_that_computes_something_else_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRIMITIVES, "tanh", PRIMITIVES["sin"])
    with pytest.raises(ExportError, match="not be what the plan runs"):
        write(planned(mlp(), PAIR), tmp_path / "never.py")
    assert not list(tmp_path.iterdir())


def test_a_file_that_does_not_run_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRIMITIVES, "tanh", lambda e: Code("[].pop()"))
    with pytest.raises(ExportError, match="as source it does not run"):
        write(planned(mlp(), PAIR), tmp_path / "never.py")
    assert not list(tmp_path.iterdir())


def test_in_shardings_fit_jit_and_optax() -> None:
    model = gpt(d=16, s=8)
    plan = planned(model, PAIR)
    shardings, params = plan.in_shardings, arrays(model.params)
    loss = jax.jit(plan, in_shardings=shardings)(params, arrays(model.batch))
    assert np.isfinite(loss)
    placed = plan.shard(params)
    assert jax.tree.map(lambda x: x.sharding, placed) == shardings[0]
    state = jax.jit(optax.adam(1e-3).init)(placed)
    assert jax.tree.structure(state[0].mu) == jax.tree.structure(shardings[0])


def test_pieces_with_one_sample(tmp_path: Path) -> None:
    def loss(p: Any, x: Any) -> Any:
        return jnp.einsum("bij,bjk->bik", jnp.tanh(x), jnp.broadcast_to(p, (2, 8, 4))).sum()

    model, path = Small(loss, f(8, 4), f(2, 4, 8)), tmp_path / "one.py"
    for seed in range(4):
        plan = planned(model, PAIR, seed)
        plan.files.export(path)
    assert_well_written(path)


def assert_equal_results(plan: Plan, path: Path, model: Small) -> None:
    """Check that the exported file computes the plan's results, and that these are the function's."""
    plan.files.export(path)
    assert_well_written(path)
    p, x = arrays(model.params), arrays(model.batch)
    wanted = plan(*plan.shard(p, x))
    jax.tree.map(np.testing.assert_array_equal, names_of_file(path)["fn"](p, x), wanted)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12), wanted, model.loss(p, x))


def test_rows_beside_scalars_and_rows_of_one_sample(tmp_path: Path) -> None:
    def fn(p: Any, x: Any) -> Any:
        early = jnp.arange(6)[None] <= x["t"]
        rows = jnp.maximum(jnp.sin(p["v"])[None], p["u"][None])
        return jnp.where(early, x["x"], -1e9).max(1), rows, x["x"] * (x["t"] - p["v"][None])

    model = Small(fn, {"v": f(6), "u": f(6)}, {"x": f(2, 6), "t": f()})
    for seed in range(2):
        assert_equal_results(planned(model, PAIR, seed), tmp_path / "row.py", model)


def test_a_loop_whose_samples_end_at_different_steps(tmp_path: Path) -> None:
    def one(x: Any, n: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.tanh(c[1])), (0, x))[1]

    def fn(w: Any, batch: Any) -> Any:
        return jnp.sin(jax.vmap(one)(lax.stop_gradient(batch["x"]), batch["n"])) * w

    model = Small(fn, f(4), {"x": f(3, 4), "n": i(3)})
    plans = [planned(model, PAIR, seed) for seed in range(2)]
    loops = [n for plan in plans for n in plan.program.pcg.nodes if n.kind == "while"]
    assert {n.types[0][0].kind for n in loops} == {"U", "P"}  # whole on every device, and in pieces
    for plan in plans:
        assert_equal_results(plan, tmp_path / "apart.py", model)


@jax.custom_jvp
def log_gamma(x: Any) -> Any:
    return lax.lgamma(x)


log_gamma.defjvps(lambda tangent, _, x: tangent * lax.digamma(x))


def test_a_custom_rule_of_a_constant_argument(tmp_path: Path) -> None:
    model = Small(lambda p, x: ((x["x"] @ p) ** 2).mean() + log_gamma(jnp.float64(1.5)) * p.mean(), f(8, 8), {"x": f(4, 8)})
    for seed in range(4):
        plan, path = planned(model, PAIR, seed), tmp_path / "constant.py"
        plan.files.export(path)
        assert_agrees(plan, path, arrays(model.params), arrays(model.batch))


def test_a_plan_and_a_file_with_a_cast_have_second_derivatives_and_batches(tmp_path: Path) -> None:
    def loss(p: Any, batch: Any) -> Any:
        return jnp.sum(jnp.sin(jax.nn.softmax(jnp.sin(batch @ p)) @ p.T) ** 2)

    def second(fn: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(jax.grad(lambda p, batch: jnp.sum(jnp.cos(jax.grad(fn)(p, batch)))))

    def batched(fn: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(lambda p, batch: jax.vmap(lambda scale: jax.grad(fn)(scale * p, batch))(jnp.arange(1.0, 4)))

    model = Small(loss, f(4, 6), f(8, 4))
    plans = (planned(model, PAIR, seed) for seed in range(100))
    plan = next(p for p in plans if any(n.kind == "unreplicate" for n, _ in p.program.pcg.walk()))
    path = tmp_path / "exported.py"
    plan.files.export(path)
    assert "unreplicate.bind(" in path.read_text()
    assert_well_written(path)
    args = arrays(model.params), arrays(model.batch)
    names = names_of_file(path)
    for transformed in (second, batched):
        wanted = transformed(loss)(*args)
        np.testing.assert_allclose(transformed(names["fn"])(*jax.device_put(args, names["in_shardings"])), wanted, rtol=1e-10)
        np.testing.assert_allclose(transformed(plan)(*plan.shard(*args)), wanted, rtol=1e-10)


def test_a_policy_that_may_offload_other_names_still_saves_its_own(tmp_path: Path) -> None:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["saved"], names_which_can_be_offloaded=["absent"], offload_src="device", offload_dst="pinned_host"
    )

    def loss(w: Any, x: Any) -> Any:
        layer = jax.checkpoint(lambda x, w: jnp.sin(checkpoint_name(jnp.tanh(x @ w), "saved")) @ w, policy=policy)
        return (layer(x, w) ** 2).mean()

    path = tmp_path / "policy.py"
    planned(Small(loss, f(8, 8), f(4, 8)), PAIR).files.export(path)
    assert 'save_only_these_names("saved")' in path.read_text()


def test_a_checkpoint_that_saves_everything_may_draw_parts_of_random_numbers(tmp_path: Path) -> None:
    def loss(w: Any, key: Any) -> Any:
        kept = jax.checkpoint(
            lambda w: jnp.tanh(w) * jax.random.uniform(key, (1, 6)).mean(0), policy=jax.checkpoint_policies.everything_saveable
        )
        return (kept(w) ** 2).sum()

    model = Small(loss, f(6), jax.eval_shape(lambda: jax.random.key(0)))
    for seed in range(8):
        planned(model, PAIR, seed).files.export(tmp_path / "exported.py")
        assert "everything_saveable" in (tmp_path / "exported.py").read_text()


@pytest.mark.parametrize("policy", ["offloaded names", "offloaded products"])
@pytest.mark.parametrize("scanned", [False, True])
def test_an_exported_plan_offloads_what_the_function_does(policy: str, scanned: bool, tmp_path: Path) -> None:
    model = saving(policy, scanned=scanned)
    path = tmp_path / "exported.py"
    planned(model, PAIR).files.export(path)
    expected = {
        "offloaded names": 'names_which_can_be_saved=("out",), names_which_can_be_offloaded=("up",), offload_src="device"',
        "offloaded products": 'jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")',
    }
    assert "".join(expected[policy].split()) in "".join(path.read_text().split())
    assert_well_written(path)
    args, names = (arrays(model.params), arrays(model.batch)), names_of_file(path)
    found = jax.value_and_grad(names["fn"])(*jax.device_put(args, names["in_shardings"]))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12), found, jax.value_and_grad(model.loss)(*args))


def test_a_policy_that_offloads_what_no_public_one_does_is_refused(tmp_path: Path) -> None:
    products = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")

    def policy(primitive: Any, *args: Any, **params: Any) -> Any:
        return True if primitive.name == "sin" else products(primitive, *args, **params)

    def loss(w: Any, x: Any) -> Any:
        return (jax.checkpoint(lambda x, w: jnp.cos(jnp.sin(x @ w)) @ w, policy=policy)(x, w) ** 2).mean()

    with pytest.raises(unity.ExportError, match="offloads other values than names"):
        planned(Small(loss, f(8, 8), f(4, 8)), PAIR).files.export(tmp_path / "refused.py")


def exact_gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


@jax.custom_jvp
def own_jvp(x: jax.Array) -> jax.Array:
    return x * lax.erf(x)


own_jvp.defjvp(lambda x, t: (own_jvp(*x), t[0] * (lax.erf(*x) + x[0] * (2 / np.sqrt(np.pi)) * jnp.exp(-x[0] * x[0]))))


@jax.custom_vjp
def own_vjp(x: jax.Array) -> jax.Array:
    return lax.erfc(x)


own_vjp.defvjp(lambda x: (lax.erfc(x), x), lambda x, g: (g * (lax.erf(x) - 2),))


@pytest.mark.parametrize("function", [exact_gelu, own_jvp, own_vjp])
def test_error_functions_have_second_derivatives_in_a_file(function: Callable[..., Any], tmp_path: Path) -> None:
    def loss(p: Any, batch: Any) -> Any:
        return jnp.sum(function(batch @ p) ** 2)

    def second(fn: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(jax.grad(lambda p, batch: jnp.sum(jnp.cos(jax.grad(fn)(p, batch)))))

    model = Small(loss, f(4, 6), f(8, 4))
    path = tmp_path / "exported.py"
    planned(model, PAIR, 0).files.export(path)
    assert_well_written(path)
    args, names = (arrays(model.params), arrays(model.batch)), names_of_file(path)
    placed = jax.device_put(args, names["in_shardings"])
    np.testing.assert_allclose(second(names["fn"])(*placed), second(loss)(*args), rtol=1e-10)


@jax.custom_vjp
def shifted_on_the_host(x: jax.Array) -> jax.Array:
    return jax.pure_callback(host_functions.shifted, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims")


shifted_on_the_host.defvjp(lambda x: (shifted_on_the_host(x), x), lambda x, g: (g * jnp.cos(x),))


def test_a_rule_that_jax_differentiates_once_is_exported(tmp_path: Path) -> None:
    model = Small(lambda p, batch: jnp.sum(shifted_on_the_host(batch @ p) ** 2), f(4, 6), f(8, 4))
    plan, path = planned(model, PAIR, 0), tmp_path / "exported.py"
    plan.files.export(path)
    assert_agrees(plan, path, arrays(model.params), arrays(model.batch))


def test_rings_of_neighbours_are_exported(tmp_path: Path) -> None:
    def turned(w: Any, x: Any) -> Any:
        before = lax.ppermute(x[-1:], "x", [(k, (k + 1) % 4) for k in range(4)])
        return jnp.tanh(jnp.concatenate([before, x[:-1]]) @ w) * x

    mesh = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
    ring: Any = jax.shard_map(turned, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"))
    model = Small(lambda w, x: (ring(w, x) ** 2).sum(), f(4, 4), f(8, 4))
    whole = 0
    for seed in range(6):
        plan, path = planned(model, PAIR, seed), tmp_path / f"ring_{seed}.py"
        plan.files.export(path)
        whole += "jnp.roll(" in path.read_text()
        assert_agrees(plan, path, arrays(model.params), arrays(model.batch))
    assert whole  # along the ring, a plan that divides it has slices of neighbours in its place


def test_reductions_by_a_function_with_a_derivative_rule(tmp_path: Path) -> None:
    def loss(p: Any, batch: Any) -> Any:
        return lax.reduce(batch @ p, -jnp.inf, jnp.logaddexp, (1,)).sum()

    model = Small(loss, f(4, 6), f(8, 4))
    args = arrays(model.params), arrays(model.batch)
    for seed in range(3):
        plan, path = planned(model, PAIR, seed), tmp_path / f"reduction_{seed}.py"
        found, wanted = (jax.jit(jax.value_and_grad(fn))(*args) for fn in (plan, loss))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), found, wanted)
        plan.files.export(path)
        assert_agrees(plan, path, *args)


def test_indices_by_a_rule_of_constants_are_exported(tmp_path: Path) -> None:
    def loss(p: Any, batch: Any) -> Any:
        return (batch @ p)[:, jnp.argsort(jax.nn.softplus(jnp.array([3.0, 1.0, 2.0])))].sum()

    model = Small(loss, f(4, 6), f(8, 4))
    plan, path = planned(model, PAIR, 0), tmp_path / "indices.py"
    plan.files.export(path)
    assert_agrees(plan, path, arrays(model.params), arrays(model.batch))


def test_a_file_written_without_64_bit_types_runs_with_them(tmp_path: Path) -> None:
    def loss(p: Any, batch: Any) -> Any:
        row = batch[0].astype(jnp.int32)
        updated = lax.dynamic_update_slice(p, p[:1, :2] + 1, (np.int32(1), row))
        return (lax.dynamic_slice(updated, (row, np.int32(1)), (2, 2)) * batch[1]).sum()

    w, batch = jnp.arange(24, dtype=jnp.float32).reshape(4, 6), jnp.array([2, 3] + 6 * [0], jnp.float32)
    path = tmp_path / "indices.py"
    with jax.enable_x64(False):
        plan = planned(Small(loss, w, batch), PAIR)
        plan.files.export(path)
        wanted = jax.jit(loss)(w, batch)
    found = jax.jit(names_of_file(path)["fn"])(w, batch)
    assert found.dtype == jnp.float32
    assert found == wanted == 3 * (13 + 14 + 19 + 20)


KEYS, KEY = jax.random.split(jax.random.key(0), 4), jax.random.key(3, impl="rbg")


def dropped_in_a_scan(w: Any, x: Any) -> Any:
    def layer(h: Any, leaves: Any) -> tuple[Any, None]:
        return jnp.tanh(h @ leaves[0]) * jax.random.bernoulli(leaves[1], 0.7, h.shape), None

    return lax.scan(layer, x, (w, KEYS))[0]


def dropped_by_one_key(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w[0]) * jax.random.bernoulli(KEY, 0.7, x.shape) + jax.random.normal(KEYS[1], (4,))


def dropped_by_a_key_a_row(w: Any, x: Any) -> Any:
    keys = jax.random.split(KEYS[0], len(x))
    return jnp.tanh(x @ w[0]) * jax.vmap(lambda k: jax.random.normal(k, (4,)))(keys)


def dropped_by_many_keys(w: Any, x: Any) -> Any:
    many = jax.random.split(jax.random.key(1), 64)
    return dropped_by_a_key_a_row(w, x) + jax.vmap(jax.random.normal)(many).sum()


@pytest.mark.parametrize("loss", [dropped_in_a_scan, dropped_by_one_key, dropped_by_a_key_a_row, dropped_by_many_keys])
def test_keys_that_a_function_closes_over(loss: Any, tmp_path: Path) -> None:
    model = Small(loss, f(4, 4, 4), f(6, 4))
    for seed in range(2):
        assert_equal_results(planned(model, PAIR, seed), tmp_path / "keys.py", model)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_a_loop_with_a_branch_by_its_counter_is_exported_under_a_mesh(kind: AxisType, tmp_path: Path) -> None:
    def fn(w: Any, x: Any) -> Any:
        def layer(h: Any, i: Any) -> tuple[Any, None]:
            return lax.cond(i > 0, lambda h: h @ w, lambda h: h * 2, h), None

        return lax.scan(layer, x, jnp.arange(4))[0]

    mesh, places = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(kind,) * 2), [tmp_path / "under", tmp_path / "outside"]
    for place in places:
        place.mkdir()
    with jax.set_mesh(mesh):
        w, x = (jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P())) for _ in range(2))
        plan = unity.optimize(fn, w, x, machine=Machine.grid(1, 8, "a100"), progress=False)
        plan.files.export(places[0] / "file.py")
    plan.files.export(places[1] / "file.py")
    under, outside = ((place / "file.py").read_text() for place in places)
    assert under == outside


def test_a_file_runs_under_its_own_mesh_inside_of_another(tmp_path: Path) -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    w, x = np.linspace(0, 1, 64).reshape(8, 8), np.linspace(-1, 1, 128).reshape(16, 8)
    expected = jax.jit(jax.value_and_grad(loss))(w, x)
    unity.optimize(loss, w, x, machine=FOUR, progress=False).files.export(tmp_path / "file.py")
    file = names_of_file(tmp_path / "file.py")
    step = jax.jit(jax.value_and_grad(file["fn"]))
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        for argument in (x, jax.device_put(x, NamedSharding(mesh, P("data")))):
            with pytest.raises((AssertionError, ValueError), match=r"with_sharding_constraint|context mesh"):
                step(w, argument)
            placed = jax.device_put((w, argument), file["in_shardings"])
            with jax.set_mesh(file["mesh"]):
                jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-10), step(*placed), expected)


@pytest.mark.parametrize("machine", [Machine.grid(1, 8, "a100"), Machine.grid(2, 4, "h100")])
def test_axes_that_are_several_factors_of_an_operator_keep_names_of_their_own(machine: Machine, tmp_path: Path) -> None:
    """The columns are two dimensions to the sum, so that one axis over both would have two of its factors."""

    def fn(x: Any) -> Any:
        return jnp.tanh(x).reshape(16, 4, 2).sum(0).reshape(8)

    x = np.arange(128.0).reshape(16, 8)
    plan = unity.optimize(fn, x, machine=machine, budget=0, progress=False)
    for k, point in enumerate(plan.frontier):
        path = tmp_path / f"factors{k}.py"
        point.files.export(path)
        for run in (names_of_file(path)["fn"], point.constrained()):
            np.testing.assert_allclose(jax.jit(run)(x), fn(x), rtol=1e-12)
