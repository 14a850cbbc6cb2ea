"""Export of a plan as one Python file of plain JAX, which is written only if its trace computes the same as the plan."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from unity.base.atomic_files import path_of, save
from unity.base.errors import ExportError
from unity.exec.lowering import run_graph, spec_of
from unity.export.arguments import FileArguments, arguments_of, spec_code, table_row
from unity.export.body_writer import Block
from unity.export.equivalence import meanings
from unity.export.graph_writer import GraphWriter
from unity.export.module import ModuleWriter, imports
from unity.export.primitives.collectives import UNREPLICATE_DEFINITION
from unity.export.primitives.public_names import ROUTED_PRODUCT, routed_definition
from unity.export.results import results_code
from unity.export.source_code import Code, call, lines, literal, mapping, returned, sequence
from unity.export.tracing import LocalProgram, piece, traced, within_mesh
from unity.pcg.ir.graph import PCG, Value
from unity.pcg.ir.program import Tensor
from unity.pcg.jaxprs.effects import TITLES, Notice, warn
from unity.pcg.types.varying_axes import CAST
from unity.plan.plan import Plan
from unity.transforms.micro_batching import with_recomputed_steps
from unity.transforms.pipelining.pipeline_operator import by_gpipe

CLOSED_OVER = "closed over/"  # the paths of arrays that the planned function closes over


def write(plan: Plan, path: str | Path) -> tuple[Path, ...]:
    """Write a plan as a Python file that needs nothing but JAX, with any arrays that it reads in a second file.

    Returns the paths of the files, the Python file first.

    Raises:
        ExportError: something in the plan has no counterpart in public JAX. The message names the operator and the source line.
    """
    path = path_of(path)
    text, arrays = source(plan, path.stem)
    if arrays:
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **{k: v.view(np.uint16) if v.dtype == jnp.bfloat16 else v for k, v in arrays.items()})
        save(path.with_suffix(".npz"), buffer.getvalue())
    save(path, text)
    return (path, path.with_suffix(".npz")) if arrays else (path,)


def source(plan: Plan, name: str) -> tuple[str, dict[str, np.ndarray]]:
    """Return the text of the file, and the arrays of the file beside it."""
    graph, captured = with_recomputed_steps(by_gpipe(plan.program.named_pcg)), plan.program.family.captured
    if captured.observations:
        graph = replace(graph, outputs=graph.outputs[: captured.out_tree.num_leaves])
        warn(Notice(o.line, f"{TITLES[o.name]} is left out of the exported file") for o in captured.observations)
    specs = [spec_of(n.types[0], graph.axes, n.tensors[0].ndim) for n in graph.inputs]
    count = len(captured.paths)
    tensors = [n.tensors[0] for n in graph.inputs]
    arguments = arguments_of(plan.program.family.fn, captured.in_tree, tensors[:count], specs[:count])
    module = ModuleWriter()
    closed = {f"{CLOSED_OVER}{k}": module.stored(np.asarray(c)) for k, c in enumerate(captured.consts)}
    paths = [*arguments.paths, *closed]
    weak = within_mesh(graph.axes, uses_64_bits(graph), lambda: _write_program(module, graph, paths))
    entry_point = _entry_point(plan, graph, arguments, closed, list(zip(weak, captured.weak[1], strict=True)), module)
    parts = [
        *_head(plan, name, arguments, module, uses_64_bits(graph)),
        *_argument_tables(arguments, dict(zip(closed, zip(tensors[count:], specs[count:], strict=True), strict=True))),
        *module.functions,
        *entry_point,
    ]
    return "\n\n\n".join("\n".join(part) for part in parts) + "\n", module.arrays


def uses_64_bits(graph: PCG) -> bool:
    """Return whether a graph computes in 64 bits."""
    dtypes = {t.dtype for n, _ in graph.walk() for t in n.tensors}
    return any(d in (np.float64, np.int64, np.uint64, np.complex128) for d in dtypes)


def _write_program(module: ModuleWriter, graph: PCG, paths: list[str]) -> tuple[bool, ...]:
    """Write the local program, check it against the plan's, and return which of its results are weakly typed."""
    writer = GraphWriter(module)
    block = Block(module, module.scope.within())
    results = writer.write(block, graph, [Code(f"w[{literal(p)}]") for p in paths])
    doc = '    """One device\'s part: `w` has its pieces of the arguments, by their paths."""'
    module.functions.append(["def program(w):", doc, *block.lines, *returned([sequence(results)], 4)])
    if any(f"{CAST}.bind(" in line for f in module.functions for line in f):
        module.functions.insert(0, [*UNREPLICATE_DEFINITION.strip().splitlines()])
    if any(f"{ROUTED_PRODUCT}.bind(" in line for f in module.functions for line in f):
        module.functions.insert(0, routed_definition())
    namespace = run_functions(module)
    pieces = [piece(Value(n), graph.axes) for n in graph.inputs]
    try:
        written = traced(lambda *operands: namespace["program"](dict(zip(paths, operands, strict=True))), pieces)
    except (NameError, TypeError, ValueError, LookupError) as error:  # JAX raises IndexError for a wrong rank
        raise ExportError("", "the program", f"as source it does not run ({error})") from error
    planned = traced(lambda *operands: tuple(run_graph(graph, operands)), pieces)
    if meanings(written.body) != meanings(planned.body):
        raise _mismatch(writer, namespace)
    return written.weak


def run_functions(module: ModuleWriter) -> dict[str, Any]:
    """Return the names that a module's functions define when the file runs."""
    namespace: dict[str, Any] = {"jnp": jnp, "np": np, "array": module.arrays.__getitem__}
    exec("\n".join(line for section in imports(module) for line in section), namespace)
    exec("\n\n\n".join("\n".join(f) for f in module.functions), namespace)
    return namespace


def _mismatch(writer: GraphWriter, namespace: dict[str, Any]) -> ExportError:
    """Return the error that names the operator whose function differs from it."""

    def is_equal(name: str, program: LocalProgram) -> bool:
        return meanings(traced(namespace[name], program.pieces).body) == meanings(program.body)

    node = next((n for name, (program, n) in writer.operator_functions.items() if not is_equal(name, program)), None)
    why = "as source it would not be what the plan runs"
    return ExportError("", "the program", why) if node is None else ExportError(node.source, node.kind, why)


def _head(plan: Plan, name: str, arguments: FileArguments, module: ModuleWriter, in_64: bool) -> list[Sequence[str]]:
    """Return the head of the file: its docstring, imports and devices."""
    machine = plan.inspect.machine
    standard, others = imports(module)
    needed = " and ".join(
        ["nothing but JAX", *sorted({where for where, _ in module.user_imports if where.partition(".")[0] != "jax"})]
    )
    return [
        [
            f'"""`{plan.__name__}` on {machine.devices} devices ({machine.name}): plain JAX, every collective written out.',
            "",
            f"Written by unity from a plan; it needs {needed}, and may be changed.",
            "",
            *_usage(name, arguments),
            *_state(plan),
            '"""',
            "",
            *standard,
            "",
            *others,
            "",
            *(['jax.config.update("jax_enable_x64", True)', ""] if in_64 else []),
            f"if jax.device_count() < {machine.devices}:",
            f'    raise RuntimeError(f"this program is for {machine.devices} devices, but JAX sees {{jax.device_count()}}")',
            "",
            f"# The devices, as axes of {'your mesh' if machine.mesh else 'the machine'}, the slowest level of the network first.",
            *lines(mapping([(literal(n).text, literal(s)) for n, s in plan.program.named_shape.items()]), 0, "AXES = "),
            f"devices = np.array(jax.devices()[:{machine.devices}]).reshape(tuple(AXES.values()))",
            "mesh = Mesh(devices, tuple(AXES), axis_types=(AxisType.Auto,) * len(AXES))",
            *(['ARRAYS = np.load(Path(__file__).with_suffix(".npz"))'] if module.arrays else []),
        ],
        *([_ARRAY.strip().splitlines()] if module.arrays else []),
    ]


def _state(plan: Plan) -> list[str]:
    """Return the part of the docstring about an optimizer's state in the memory of the host."""
    paths = [path for path, hosted in zip(plan.program.family.captured.paths, plan.program.hosted_state, strict=True) if hosted]
    if not paths:
        return []
    is_all = len(paths) == len(plan.program.family.differentiated)
    return [
        "",
        f"The plan has the optimizer's state of {'all' if is_all else 'some'} weights in the memory of the host. This file does",
        'not contain it. Place it like its weight, by sharding.with_memory_kind("pinned_host"). In the update, fetch it by',
        "jax.device_put(state, jax.memory.Space.Device), and send the next state back by jax.device_put(state,",
        f"jax.memory.Space.Host).{'' if is_all else ' These are the weights:'}",
        *([] if is_all else ["", *(f"    {path}" for path in paths)]),
    ]


_ARRAY = '''
def array(name):
    """A constant from the file beside this one."""
    return ARRAYS[name]
'''


def _usage(name: str, arguments: FileArguments) -> list[str]:
    """Return the lines of the docstring that show how the file is used."""
    names, comma = ", ".join(arguments.names), "," if len(arguments.names) == 1 else ""
    if arguments.plain:
        usage, placement = [f"    from {name} import fn, in_shardings", ""], "in_shardings"
    else:
        tree = ", ".join(f'"{n}": {n}' for n in arguments.names)
        usage = [f"    from {name} import fn, shardings", "", f"    there = shardings({{{tree}}})"]
        placement = "(" + ", ".join(f'there["{n}"]' for n in arguments.names) + comma + ")"
    return [*usage, f"    {names}{comma} = jax.device_put(({names}{comma}), {placement})", f"    jax.jit(fn)({names})"]


_LOOK_UP = r'''
def argument(path):
    """Shape, type and partition of the argument with a path."""
    return ARGUMENTS[path] if path in ARGUMENTS else ARGUMENTS[re.sub(r"(?<=/)\d+(?=/|$)", "*", path)]


def path_of(keys):
    """A path as ARGUMENTS has it."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def shardings(arguments):
    """Where arguments belong, given as a dictionary by name."""
    return jax.tree.map_with_path(lambda keys, _: NamedSharding(mesh, argument(path_of(keys))[2]), arguments)
'''


def _argument_tables(arguments: FileArguments, closed: dict[str, tuple[Tensor, Any]]) -> list[Sequence[str]]:
    """Return the table of the arguments, and the functions that look them up."""
    table = arguments.table()
    if closed:
        closed_rows = mapping([(literal(p).text, table_row(t, s)) for p, (t, s) in closed.items()])
        table = replace(sequence((*table.items, *closed_rows.items), "[]"), head="{", close="}")
    comment = ["# Every argument by its path: shape, type, and the axes that partition its dimensions; * is any number."]
    look_up: list[Sequence[str]] = [
        [*comment, *lines(table, 0, "ARGUMENTS = ")],
        *(part.splitlines() for part in _LOOK_UP.strip().split("\n\n\n")),
    ]
    if not arguments.plain:
        return look_up
    names = ", ".join(f"there[{literal(n)}]" for n in arguments.names) + ("," if len(arguments.names) == 1 else "")
    structure = [
        "# What the arguments are made of; 0 stands for an array.",
        *lines(arguments.structure(), 0, "STRUCTURE = "),
        "there = shardings(STRUCTURE)",
        f"in_shardings = ({names})",
    ]
    return [*look_up, structure]


def _entry_point(
    plan: Plan,
    graph: PCG,
    arguments: FileArguments,
    closed: dict[str, Code],
    weak: Sequence[tuple[bool, bool]],
    module: ModuleWriter,
) -> list[Sequence[str]]:
    """Return the function that takes whole arrays, and a first run of it.

    Args:
        plan: the plan.
        graph: its graph.
        arguments: the arguments of the function.
        closed: the arrays that the function closes over, by path.
        weak: for each result, whether the local program's and the planned function's result is weakly typed.
        module: the file, which imports the classes of the results.
    """
    specs = sequence([spec_code(spec_of(v.type, graph.axes, v.tensor.ndim)) for v in graph.outputs])
    by_name = mapping([(literal(n).text, Code(n)) for n in arguments.names])
    closed_lines = [f"    given[{literal(p)}] = {c}" for p, c in closed.items()]
    run_lines = [
        "@jax.jit",
        "def run(given):",
        '    """The results for arguments by their paths, wherever they lie."""',
        *closed_lines,
        "    specs = {path: argument(path)[2] for path in given}",
        "    wrong = [path for path, x in given.items() if jnp.shape(x) != argument(path)[0]]",
        "    if wrong:",
        '        raise ValueError(f"these have other shapes than planned for: {wrong}")',
        "    placed = {path: lax.with_sharding_constraint(x, NamedSharding(mesh, specs[path])) for path, x in given.items()}",
        *lines(specs, 4, "out_specs = "),
        "    return jax.shard_map(program, mesh=mesh, in_specs=(specs,), out_specs=out_specs)(placed)",
    ]

    def result_code(k: int) -> Code:
        written, planned = weak[k]
        return call("typed", Code(f"results[{k}]"), weak=planned) if written or planned else Code(f"results[{k}]")

    structure = plan.program.family.captured.out_tree
    results = results_code(module, structure, [result_code(k) for k in range(structure.num_leaves)])
    doc = (plan.__doc__ or "").strip().split("\n")[0].replace('"""', "'''").replace("\\", "\\\\")
    fn = [
        f"def fn({', '.join(arguments.names)}):",
        f'    """{doc or "What the planned function gives."}"""',
        *lines(by_name, 4, "leaves = jax.tree_util.tree_leaves_with_path(", ")"),
        "    results = run({path_of(keys): x for keys, x in leaves})",
        *lines(results, 4, "return "),
    ]
    helpers = [_TYPED.strip().splitlines()] if any(written or planned for written, planned in weak) else []
    return [run_lines, *helpers, fn, _ZEROS.strip().splitlines(), _main(arguments)]


_TYPED = '''
def typed(x, weak):
    """The same array, weakly typed (it takes the type of what it is combined with, as a Python number does) or not."""
    return lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=weak, sharding=None)
'''

_ZEROS = '''
def zeros(path):
    """An array like the argument with a path."""
    shape, dtype, spec = argument(path)
    x = jnp.broadcast_to(jax.random.key(0), shape) if dtype.startswith("key") else jnp.zeros(shape, dtype)
    return jax.device_put(x, NamedSharding(mesh, spec))
'''


def _main(arguments: FileArguments) -> list[str]:
    condition = 'if __name__ == "__main__":'
    if not arguments.plain:
        return [condition, "    print(jax.tree.map(jnp.shape, jax.jit(run)({path: zeros(path) for path in ARGUMENTS})))"]
    names = ", ".join(f"arguments[{literal(n)}]" for n in arguments.names)
    return [
        condition,
        "    arguments = jax.tree.map_with_path(lambda keys, _: zeros(path_of(keys)), STRUCTURE)",
        *lines(Code(f"jax.tree.map(jnp.shape, jax.jit(fn)({names}))"), 4, "print(", ")"),
    ]
