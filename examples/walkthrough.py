"""Follows a two-layer perceptron through every form that a function takes on its way to a plan, and prints each form.

python examples/walkthrough.py            # all of them
python examples/walkthrough.py problem    # one: jaxpr, graph, problem, assignment, parallel or local
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp

import unity
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.ir.graph import PCG, Value
from unity.pcg.parallel.parallelize import Assignment, parallelize
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import show
from unity.search.cost.cost import Training
from unity.search.session import Search


def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A two-layer perceptron and the mean of its squared results."""
    hidden = jax.nn.relu(x @ params["w1"])
    return jnp.mean((hidden @ params["w2"]) ** 2)


PARAMS = {"w1": jax.ShapeDtypeStruct((1024, 4096), jnp.float32), "w2": jax.ShapeDtypeStruct((4096, 1024), jnp.float32)}
BATCH = jax.ShapeDtypeStruct((256, 1024), jnp.float32)
MACHINE = Machine.grid(1, 4, "a100")

captured = capture(loss, PARAMS, BATCH)
search = Search(captured.graph, captured.differentiated, MACHINE, Training())
fastest = search.fastest


def value_text(value: Value, axes: Sequence[Axis]) -> str:
    """The tensor of a value, and how it is laid out over the mesh if its graph is parallel."""
    tensor = f"{value.tensor.dtype}{list(value.tensor.shape)}"
    return f"{tensor} {show(value.type, axes, value.tensor.ndim)}" if axes else tensor


def graph_text(graph: PCG) -> str:
    """One line for each node: its operands, and the tensors that it produces with their parallel types."""
    names = {node: f"%{k}" for k, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        operands = ", ".join(names[v.node] for v in node.operands)
        lines.append(f"{names[node]} = {node.kind}({operands}): {', '.join(value_text(v, graph.axes) for v in node.results)}")
    return "\n".join(lines)


def problem_text() -> str:
    """One line for each variable of the optimization problem: its number of values, and the variables it shares costs with."""
    assembled = search.assembled
    lines = []
    for k, (site, domain) in enumerate(zip(assembled.opened.sites, assembled.domains, strict=True)):
        neighbours = ", ".join(str(port.source) for port in site.ports)
        lines.append(f"variable {k}: {len(domain)} values, costs shared with ({neighbours})")
    return "\n".join(lines)


def assignment_text(assignment: Assignment) -> str:
    """One line for each operator: the types in which it takes its operands and leaves its results."""
    axes, lines = assignment.axes, []
    for node in captured.graph.nodes:
        operands = [show(assignment.operands[id(node), p][-1], axes, v.tensor.ndim) for p, v in enumerate(node.operands)]
        results = [show(t, axes, v.tensor.ndim) for t, v in zip(assignment.results[id(node)], node.results, strict=True)]
        lines.append(f"{node.kind}: {', '.join(operands)} -> {', '.join(results)}")
    return "\n".join(lines)


def local_text() -> str:
    """The program of one device, every collective written out."""
    plan = unity.optimize(loss, PARAMS, BATCH, machine=MACHINE, budget=0, progress=False)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "mlp.py"
        plan.files.export(path)
        return path.read_text()


FORMS: dict[str, Callable[[], object]] = {
    "jaxpr": lambda: jax.make_jaxpr(loss)(PARAMS, BATCH),
    "graph": lambda: graph_text(captured.graph),
    "problem": problem_text,
    "assignment": lambda: assignment_text(fastest.assignment),
    "parallel": lambda: graph_text(parallelize(captured.graph, fastest.assignment)),
    "local": local_text,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or FORMS:
        print(f"# {name}\n{FORMS[name]()}\n")
