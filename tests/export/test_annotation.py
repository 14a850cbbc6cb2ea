"""`plan.files.annotate`: a plan's sharding constraints in the user's source, as a diff that applies, and never in a wrong place."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import unity
from unity.base.errors import PlanError
from unity.exec.compiled.hlo import collectives
from unity.export import Annotation
from unity.export.annotations.constraint_writer import CONSTRAINT
from unity.export.annotations.decisions import planned_values

pytestmark = pytest.mark.usefixtures("own_cache")

EIGHT, NODES = unity.Machine.grid(1, 8, "a100", intra=(300e9, 1.9e-6)), unity.Machine.grid(2, 4, "v100")

MODEL = '''"""A model as people write it; ä and 中 take several bytes."""

import jax
import jax.numpy as jnp


def layer(x, w):
    h = jax.nn.gelu(x @ w["up"])  # ä
    return (
        h
        @ w["down"]
    )


def loss(params, x, y):
    for w in params["layers"]:
        x += layer(x, w)  # a residual
    text = "中"; logits = jnp.tanh(x) @ params["out"]
    logp = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logp, y[:, None], 1).mean()
'''
TENSOR = {"params['layers'][*]['up']": P(None, "device"), "params['layers'][*]['down']": P("device"), "x": P()}
SHARDED = {"params['layers'][*][*]": P("device"), "x": P("device")}
SEVERAL = "the line runs several times, and its results are divided in different ways"
VOCABULARY = {"params['out']": P(None, "device"), "x": P("node")}


def imported(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape) / 8, "float32")  # noqa: E731
    params = {"layers": [{"up": array(64, 256), "down": array(256, 64)} for _ in range(2)], "out": array(64, 512)}
    return params, array(2048, 64), jnp.asarray(rng.integers(512, size=2048), "int32")


def written(folder: Path, text: str) -> ModuleType:
    (folder / "model.py").write_text(text, encoding="utf-8")
    return imported(folder / "model.py", "model")


def planned(fn: Any, *args: Any, pins: dict[str, P] | None = None, machine: unity.Machine = EIGHT) -> unity.Plan:
    constraints = [unity.pin(path, spec) for path, spec in (pins or {}).items()]
    return unity.optimize(fn, *args, machine=machine, search="captured", constraints=constraints, progress=False)


def compiled(fn: Any, annotation: Annotation, args: tuple[Any, ...]) -> Any:
    shape = annotation.mesh_shape
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), annotation.in_specs, is_leaf=lambda s: isinstance(s, P))
    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(fn), in_shardings=shardings, out_shardings=(None, shardings[0]))
        return step.lower(*args).compile()(*jax.device_put(args, shardings)), step.lower(*args).compile().as_text()


@pytest.mark.parametrize(("pins", "machine"), [(TENSOR, EIGHT), (SHARDED, EIGHT), (VOCABULARY, NODES)])
def test_the_diff_applies_and_communicates_as_constrained(
    pins: dict[str, P], machine: unity.Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module, args = written(tmp_path, MODEL), arguments()
    plan = planned(module.loss, *args, pins=pins, machine=machine)
    annotation = plan.files.annotate("model.py")
    subprocess.run(["git", "apply"], input=annotation.diff, text=True, check=True, cwd=tmp_path)
    assert (tmp_path / "model.py").read_text(encoding="utf-8") == annotation.source
    changed = imported(tmp_path / "model.py", "changed")
    found, text = compiled(changed.loss, annotation, args)
    wanted = jax.value_and_grad(module.loss)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), found, wanted)
    sent, constrained = float(sum(c.elements * c.count for c in collectives(text))), plan.check(partitioned=True).total.compiled
    assert 0 < sent <= constrained
    if pins is TENSOR:  # the two runs of a line that differ have no constraint
        assert [(u.line, u.expression, u.reason) for u in annotation.unannotated] == [
            (8, 'w["up"] in x @ w["up"]', SEVERAL), (8, 'x @ w["up"]', SEVERAL), (10, 'w["down"] in h @ w["down"]', SEVERAL)
        ]  # fmt: skip
    else:
        assert annotation.unannotated == ()
        assert sent == pytest.approx(constrained, rel=0.07)


COLUMNS = {"p['a']": P(None, "device"), "p['b']": P(None, "device"), "x": P("device")}
ROWS = {"p['a']": P(None, "device"), "p['b']": P("device"), "x": P()}
INNER = {"p['a']": P(), "p['b']": P(), "x": P(None, "device")}
HEAD = "import jax\nimport jax.numpy as jnp\n\n"
# Sources, the arguments' shardings, and whether all constraints can be written.
MANNERS = {
    "unpacked rows": (COLUMNS, False, """def loss(p, x):
    q, k = (x @ p["a"]).reshape(2048, 2, 128).swapaxes(0, 1)
    *rest, last = jnp.split(q @ p["a"][:, :128].T + k @ p["b"][:128], 2, axis=-1)
    first, = rest
    return (first * last).mean()
"""),
    "results of several ranks": (ROWS, False, """def act(x, y):
    return jnp.tanh(x + y)
def loss(p, x):
    h = act(x @ p["a"], p["a"][0])
    return ((h @ p["b"]) * act(p["b"][3], p["b"][4])).mean() + act(p["b"][0, 0], h[0, 0])
"""),
    "operands of several ranks": (INNER, False, """def dense(x, w):
    return x @ w
def loss(p, x):
    return ((jnp.tanh(dense(x, p["a"])) @ p["b"]) ** 2).mean() * jnp.tanh(dense(p["a"][:, 0], p["a"])).sum()
"""),
    "f-string": (ROWS, False, """def loss(p, x):
    text = f'{(h := x @ p["a"]).shape} and {h.ndim}'
    return ((h @ p["b"]) ** 2).mean() + len(text)
"""),
    "calls below each other": ({"p['a']": P("device"), "p['b']": P("device"), "x": P("device")}, True, """def loss(p, x):
    return (
        (x @ p["a"])
        .dot(p["b"])
        .T  # ä
        .dot(x)
        .sum(1)
        ** 2
    ).mean()
"""),
    "other line ends": (COLUMNS, True, """text = "a\u2028\x1c"; \x0c
def loss(p, x):
\th = jnp.tanh(x @ p["a"]); "中"; h = h * 2
\th += 1
\treturn ((h @ p["b"]) ** 2).mean()
"""),
    "CRLF": (COLUMNS, True, """def loss(p, x):\r
    h = x @ p["a"]\r
    h += p["a"][0]\r
    return ((h @ p["b"]) ** 2).mean()\r
"""),
    "methods": (COLUMNS, True, """class Model:
    def __init__(self, p): self.p = p
    @property
    def up(self): return self.p["a"]
    def __call__(self, x): self.h = jax.nn.gelu(x @ self.up); return self.h @ self.p["b"]
@jax.jit
def loss(p, x):
    if (y := Model(p)(x)).ndim == 2 and 0 < y.ndim < 3: y = [(lambda r, f=jnp.tanh: f(r))(y) for _ in "a"][0]
    return -(-y ** 2).mean()
"""),
}  # fmt: skip


@pytest.mark.parametrize("manner", MANNERS)
def test_constraints_change_no_value_however_the_source_is_written(
    manner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pins, is_complete, text = MANNERS[manner]
    (tmp_path / "model.py").write_bytes((HEAD.replace("\n", "\r\n" if "\r" in text else "\n") + text).encode())
    fn = imported(tmp_path / "model.py", "model").loss
    rng = np.random.default_rng(0)
    a, b, x = (jnp.asarray(rng.normal(size=size) / 8, "float32") for size in ((64, 256), (256, 64), (2048, 64)))
    args = {"a": a, "b": b}, x
    annotation = planned(fn, *args, pins=pins).files.annotate("model.py")
    assert (annotation.unannotated == ()) == is_complete, annotation.unannotated
    assert CONSTRAINT in annotation.source
    subprocess.run(["git", "apply"], input=annotation.diff.encode(), check=True, cwd=tmp_path)
    assert (tmp_path / "model.py").read_bytes() == annotation.source.encode()
    results, _ = compiled(imported(tmp_path / "model.py", "changed").loss, annotation, args)
    for y, z in zip(jax.tree.leaves(results), jax.tree.leaves(jax.value_and_grad(fn)(*args)), strict=True):
        np.testing.assert_allclose(y, z, rtol=2e-4, atol=2e-6 * np.abs(z).max())


TWO_LAYERS = """def block(x, p):
    return x + jnp.tanh(x @ p["up"]) @ p["down"]
def loss(params, x):
    for p in params:
        x = block(x, p)
    return jnp.mean(x**2)
"""
LEFT_OUT = {
    "mapped": ("jnp.mean(jax.vmap(lambda row: row @ w)(x) ** 2)", "inside of a function that is mapped"),
    "alike": ("jnp.mean((x @ w) * (x @ w.T))", "several expressions are a dot_general of float32[2048, 64]"),
    "library": ("jnp.mean(jnp.linalg.multi_dot([x, w, w]) ** 2)", "inside of a library's function"),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_no_single_expression_computes_is_left_out_with_the_reason(name: str, tmp_path: Path) -> None:
    code, reason = LEFT_OUT[name]
    module = written(tmp_path, f"import jax\nimport jax.numpy as jnp\n\ndef loss(w, x):\n    return {code}\n")
    args = jnp.ones((64, 64)), jnp.ones((2048, 64))
    annotation = planned(module.loss, *args, pins={"w": P("device"), "x": P("device")}).files.annotate(tmp_path / "model.py")
    assert any(u.line == 5 and reason in u.reason for u in annotation.unannotated), annotation.unannotated
    exec(compile(annotation.source, "model.py", "exec"), {})


CALLED = {
    "jnp.mean(jax.vmap(lambda row: jax.nn.relu(row))(x) @ w)": "relu is inside of a function that is mapped",
    "jnp.mean(jax.vmap(lambda row: mine(row))(x) @ w)": "mine is inside of a function that is mapped",
    "jnp.mean(jax.nn.relu(x) @ w + jax.nn.relu(2 * x) @ w)": "several expressions are a relu of float32[8, 64]",
}
RULE = """@jax.custom_jvp
def mine(x):
    return jnp.sin(x)

mine.defjvp(lambda x, t: (mine(*x), jnp.cos(x[0]) * t[0]))
"""


@pytest.mark.parametrize("call", ["jax.nn.relu(x)", "mine(x)", "jax.vmap(jax.nn.relu)(x)"])
def test_a_function_with_its_own_derivative_is_constrained_where_it_is_called(call: str, tmp_path: Path) -> None:
    code = f"jnp.mean({call} @ w)"
    module = written(tmp_path, f"import jax\nimport jax.numpy as jnp\n\n{RULE}\ndef loss(w, x):\n    return {code}\n")
    args = jnp.eye(64), jnp.ones((8, 64)) / 8
    plan = planned(module.loss, *args, pins=dict.fromkeys(("w", "x"), P(None, "device")))
    annotation = plan.files.annotate(tmp_path / "model.py")
    assert annotation.unannotated == ()
    assert f"jax.lax.with_sharding_constraint({call}, P(None, 'device')) @ w" in annotation.source
    (tmp_path / "changed.py").write_text(annotation.source, encoding="utf-8")
    found, _ = compiled(imported(tmp_path / "changed.py", "changed").loss, annotation, args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), found, jax.value_and_grad(module.loss)(*args))


@pytest.mark.parametrize("code", CALLED)
def test_functions_with_their_own_derivatives_are_left_out_by_their_names(code: str, tmp_path: Path) -> None:
    module = written(tmp_path, f"import jax\nimport jax.numpy as jnp\n\n{RULE}\ndef loss(w, x):\n    return {code}\n")
    pins = {"w": P(None, "device"), "x": P(None, "device")}
    plan = planned(module.loss, jnp.ones((64, 64)), jnp.ones((8, 64)), pins=pins)
    reasons = [u.reason for u in plan.files.annotate(tmp_path / "model.py").unannotated]
    assert [reason for reason in reasons if CALLED[code] in reason], reasons
    assert not [reason for reason in reasons if "custom" in reason]


@pytest.mark.parametrize(
    ("head", "imports", "call"),
    [
        ("from jax import numpy as jnp", ["import jax", "from jax.sharding import PartitionSpec as P"], "jax.lax.{}(x @ "),
        ("import jax as j\nfrom jax.sharding import PartitionSpec as S\nimport jax.numpy as jnp", [], "j.lax.{}(x @ "),
        ("import jax, jax.numpy as jnp\nP = 3\nQ = P", [], "jax.sharding.PartitionSpec("),
    ],
)
def test_imports_and_names_are_those_of_the_file(head: str, imports: list[str], call: str, tmp_path: Path) -> None:
    module = written(
        tmp_path, f'"""Text."""\nfrom __future__ import annotations\n{head}\n\ndef loss(w, x):\n    return jnp.mean((x @ w) ** 2)\n'
    )
    args = jnp.ones((64, 64)), jnp.ones((2048, 64))
    annotation = planned(module.loss, *args, pins={"w": P("device"), "x": P(None, "device")}).files.annotate(tmp_path / "model.py")
    added = [line[1:] for line in annotation.diff.splitlines() if line.startswith("+") and "import" in line]
    assert added == imports
    assert call.format(CONSTRAINT) in annotation.source or call in annotation.source
    exec(compile(annotation.source, "model.py", "exec"), {})


def test_equal_layers_on_lines_of_their_own_each_have_their_constraints(tmp_path: Path) -> None:
    """Their operators share a body, whose equations have the first layer's line."""
    layers = """def loss(w, x):
    h = jnp.tanh(x @ w["a"])
    h = jnp.tanh(h @ w["b"])
    return jnp.mean((h @ w["c"]) ** 2)
"""
    module = written(tmp_path, HEAD + layers)
    args = {name: jnp.ones((256, 256)) / 256 for name in "abc"}, jnp.ones((128, 256))
    plan = unity.optimize(module.loss, *args, machine=EIGHT, search="fsdp", progress=False)
    annotation = plan.files.annotate(tmp_path / "model.py")
    constrained = [line for line in annotation.source.splitlines() if "with_sharding_constraint" in line]
    assert len(constrained) == 3
    assert all(f'with_sharding_constraint(w["{name}"], P())' in line for name, line in zip("abc", constrained, strict=True))
    assert annotation.unannotated == ()


def test_equal_operators_on_lines_that_overlap_have_each_their_own(tmp_path: Path) -> None:
    """The line on which the second softmax begins is also one of the first's."""
    layers = """def loss(w, x):
    m = jnp.exp(x @ w["a"])
    m = m / m.sum(-1, keepdims=True); m = jnp.exp(m @ w["b"])
    m = m / m.sum(-1, keepdims=True)
    return jnp.mean((m @ w["c"]) ** 2)
"""
    module = written(tmp_path, HEAD + layers)
    args = {name: jnp.ones((256, 256)) / 256 for name in "abc"}, jnp.ones((128, 256))
    plan = unity.optimize(module.loss, *args, machine=EIGHT, search="fsdp", progress=False)
    first = (HEAD + layers).splitlines().index("def loss(w, x):") + 2
    values = [v.computed for v in planned_values(plan.program.pcg, str((tmp_path / "model.py").resolve())) if not v.side]
    lines = {name: [c.line - first for c in values if c.primitive == name] for name in ("dot_general", "exp", "reduce_sum", "div")}
    assert lines == {"dot_general": [0, 1, 3], "exp": [0, 1], "reduce_sum": [1, 2], "div": [1, 2]}


def test_a_line_whose_runs_differ_has_no_constraint(tmp_path: Path) -> None:
    module = written(tmp_path, HEAD + TWO_LAYERS)
    params = [{"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}] * 2
    pins = {
        "params[0]['up']": P(), "params[0]['down']": P(), "params[1]['up']": P(None, "d2"), "params[1]['down']": P("d2"),
        "x": P("device"),
    }  # fmt: skip
    plan = planned(module.loss, params, jnp.ones((128, 64)), pins=pins)
    annotation = plan.files.annotate(tmp_path / "model.py")
    assert annotation.diff == ""
    assert str(annotation).startswith("no constraint to write into")
    product, line = 'x @ p["up"]', 'x + jnp.tanh(x @ p["up"]) @ p["down"]'
    reasons = {u.expression: u.reason for u in annotation.unannotated}
    assert {u.line for u in annotation.unannotated} == {5}
    assert reasons.pop(line.removeprefix("x + ")) == "a sum over devices that is not added up there, in one of its runs"
    operands = [f"x in {product}", f'p["up"] in {product}', f'p["down"] in {line.removeprefix("x + ")}']
    assert reasons == dict.fromkeys([line, product, *operands], SEVERAL)
    same = {f"params[{k}]['{name}']": spec for k in range(2) for name, spec in (("up", P(None, "d2")), ("down", P("d2")))}
    alike = planned(module.loss, params, jnp.ones((4096, 64)), pins={**same, "x": P(("d0", "d1"))})
    assert "(x, P('device_a')) @ jax" in alike.files.annotate(tmp_path / "model.py").source


def test_files_without_the_function_are_refused(tmp_path: Path) -> None:
    module = written(tmp_path, MODEL)
    plan = planned(module.loss, *arguments(), pins=SHARDED)
    (tmp_path / "other.py").write_text("x = 1\n")
    (tmp_path / "text.md").write_text("# no Python\n?")
    for name, why in (("other.py", "has no line of loss"), ("text.md", "cannot be read as Python"), ("none.py", "cannot be read")):
        with pytest.raises(PlanError, match=why):
            plan.files.annotate(tmp_path / name)
