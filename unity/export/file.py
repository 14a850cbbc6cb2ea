"""A plan as one file of plain JAX, traced again before it is written: it does what the plan does, or there is no file."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from unity.base.atomic_files import path_of, save
from unity.exec.lowering import run_graph, spec_of
from unity.export.arguments import Arguments, arguments_of, is_plain, skeleton, spec_code
from unity.export.block import Block
from unity.export.collectives import DEFINED
from unity.export.errors import ExportError
from unity.export.graphs import GraphWriter
from unity.export.imports import imports
from unity.export.module import Module
from unity.export.same import meanings
from unity.export.source import Code, call, lines, literal, mapping, returned, sequence
from unity.export.tracing import inside, piece, traced
from unity.pcg.ir.graph import PCG, Value
from unity.pcg.ir.program import Tensor
from unity.pcg.types.varying_axes import CAST
from unity.transforms.pipelining.staged import by_gpipe

if TYPE_CHECKING:
    from unity.plan.plan import Plan

CLOSED_OVER = "closed over/"  # the paths of arrays that the planned function closes over


def write(plan: Plan, path: str | Path) -> tuple[Path, ...]:
    """Writes a plan as a Python file that needs nothing but JAX, and beside it, if there are any, the arrays that it reads.

    Gives the files, the Python file first.

    Raises ExportError, naming the operator and the user's line, if something in it has no counterpart in public JAX.
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
    """The text of the file, and the arrays beside it."""
    graph, captured = by_gpipe(plan.pcg), plan._made.captured
    specs = [spec_of(n.types[0], graph.axes, n.tensors[0].ndim) for n in graph.inputs]
    count = len(captured.paths)
    tensors = [n.tensors[0] for n in graph.inputs]
    arguments = arguments_of(plan._made.fn, captured.in_tree, tensors[:count], specs[:count])
    module = Module()
    closed = {f"{CLOSED_OVER}{k}": module.stored(np.asarray(c)) for k, c in enumerate(captured.consts)}
    paths = [*arguments.paths, *closed]
    weak = inside(graph.axes, wide(graph), lambda: _written(module, graph, paths))
    parts = [
        *_head(plan, name, arguments, module, wide(graph)),
        *_tables(arguments, dict(zip(closed, zip(tensors[count:], specs[count:], strict=True), strict=True))),
        *module.functions,
        *_entry(plan, graph, arguments, closed, [(now, then) for now, then in zip(weak, captured.weak[1], strict=True)]),
    ]
    return "\n\n\n".join("\n".join(part) for part in parts) + "\n", module.arrays


def wide(graph: PCG) -> bool:
    """Whether a graph computes in 64 bits."""
    dtypes = {t.dtype for n, _ in graph.walk() for t in n.tensors}
    return any(d in (np.float64, np.int64, np.uint64, np.complex128) for d in dtypes)


def _written(module: Module, graph: PCG, paths: list[str]) -> tuple[bool, ...]:
    """Writes the local program, compares it with the plan's, and returns which of its results are weakly typed."""
    writer = GraphWriter(module)
    block = Block(module, module.scope.within())
    results = writer.write(block, graph, [Code(f"w[{literal(p)}]") for p in paths])
    about = '    """One device\'s part: `w` has its pieces of the arguments, by their paths."""'
    module.functions.append(["def program(w):", about, *block.lines, *returned([sequence(results)], 4)])
    if any(f"{CAST}.bind(" in line for f in module.functions for line in f):
        module.functions.insert(0, [*DEFINED.strip().splitlines()])
    space = run(module)
    pieces = [piece(Value(n), graph.axes) for n in graph.inputs]
    try:
        here = traced(lambda *given: space["program"](dict(zip(paths, given, strict=True))), pieces)
    except (NameError, TypeError, ValueError, LookupError) as error:  # of a wrong rank JAX raises IndexError
        raise ExportError("", "the program", f"as source it does not run ({error})") from error
    wanted = traced(lambda *given: tuple(run_graph(graph, given)), pieces)
    if meanings(here.body) != meanings(wanted.body):
        raise _different(writer, space)
    return here.weak


def run(module: Module) -> dict[str, Any]:
    """The functions of a module, as they are when the file is run."""
    space: dict[str, Any] = {"jnp": jnp, "np": np, "array": module.arrays.__getitem__}
    exec("\n".join(line for section in imports(module) for line in section), space)
    exec("\n\n\n".join("\n".join(f) for f in module.functions), space)
    return space


def _different(writer: GraphWriter, space: dict[str, Any]) -> ExportError:
    """Which operator's function does something else than the operator."""
    from unity.export.tracing import Program

    def same(name: str, program: Program) -> bool:
        return meanings(traced(space[name], program.pieces).body) == meanings(program.body)

    wrong = next((node for name, (program, node) in writer.written.items() if not same(name, program)), None)
    why = "as source it would not be what the plan runs"
    return ExportError("", "the program", why) if wrong is None else ExportError(wrong.source, wrong.kind, why)


def _head(plan: Plan, name: str, arguments: Arguments, module: Module, in_64: bool) -> list[Sequence[str]]:
    """What the file is, its imports, its devices."""
    machine, axes = plan.machine, plan.machine.axes or ()
    shape = tuple(a.size for a in axes) or (1,)
    names = tuple(a.name for a in axes) or ("d0",)
    standard, others = imports(module)
    needed = " and ".join(["nothing but JAX", *sorted({where for where, _ in module.imports})])
    return [
        [
            f'"""`{plan.__name__}` on {machine.devices} devices ({machine.name}): plain JAX, every collective written out.',
            "",
            f"Written by unity from a plan; it needs {needed}, and may be changed.",
            "",
            *_usage(name, arguments),
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
            "# The devices, as axes of prime size, the slowest level of the network first.",
            *lines(mapping([(literal(n).text, literal(s)) for n, s in zip(names, shape, strict=True)]), 0, "AXES = "),
            f"devices = np.array(jax.devices()[:{machine.devices}]).reshape(tuple(AXES.values()))",
            "mesh = Mesh(devices, tuple(AXES), axis_types=(AxisType.Auto,) * len(AXES))",
            *(['ARRAYS = np.load(Path(__file__).with_suffix(".npz"))'] if module.arrays else []),
        ],
        *([_ARRAY.strip().splitlines()] if module.arrays else []),
    ]


_ARRAY = '''
def array(name):
    """A constant from the file beside this one."""
    return ARRAYS[name]
'''


def _usage(name: str, arguments: Arguments) -> list[str]:
    """How the file is used, for its first lines."""
    given, one = ", ".join(arguments.names), "," if len(arguments.names) == 1 else ""
    if arguments.plain:
        first, where = [f"    from {name} import fn, in_shardings", ""], "in_shardings"
    else:
        tree = ", ".join(f'"{n}": {n}' for n in arguments.names)
        first = [f"    from {name} import fn, shardings", "", f"    there = shardings({{{tree}}})"]
        where = "(" + ", ".join(f'there["{n}"]' for n in arguments.names) + one + ")"
    return [*first, f"    {given}{one} = jax.device_put(({given}{one}), {where})", f"    jax.jit(fn)({given})"]


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


def _tables(arguments: Arguments, closed: dict[str, tuple[Tensor, Any]]) -> list[Sequence[str]]:
    """Shapes and partitions of the arguments, and how they are looked up."""
    from unity.export.arguments import entry

    table = arguments.table()
    if closed:
        more = mapping([(literal(p).text, entry(t, s)) for p, (t, s) in closed.items()])
        table = replace(sequence((*table.items, *more.items), "[]"), head="{", close="}")
    first = ["# Every argument by its path: shape, type, and the axes that partition its dimensions; * is any number."]
    look_up: list[Sequence[str]] = [
        [*first, *lines(table, 0, "ARGUMENTS = ")],
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


def _entry(
    plan: Plan, graph: PCG, arguments: Arguments, closed: dict[str, Code], weak: Sequence[tuple[bool, bool]]
) -> list[Sequence[str]]:
    """The function that takes whole arrays, and a first run of it. `weak`: whether results of the program, and of the function, are
    weakly typed."""
    specs = sequence([spec_code(spec_of(v.type, graph.axes, v.tensor.ndim)) for v in graph.outputs])
    tree = plan._made.captured.out_tree
    results = jax.tree.unflatten(tree, list(range(tree.num_leaves)))
    if not is_plain(results):
        kind = type(results).__name__
        raise ExportError("", f"the result, a {kind},", "it is made of more than dictionaries, lists and tuples; return those")
    given = mapping([(literal(n).text, Code(n)) for n in arguments.names])
    more = [f"    given[{literal(p)}] = {c}" for p, c in closed.items()]
    spread = [
        "@jax.jit",
        "def run(given):",
        '    """The results for arguments by their paths, wherever they lie."""',
        *more,
        "    specs = {path: argument(path)[2] for path in given}",
        "    wrong = [path for path, x in given.items() if jnp.shape(x) != argument(path)[0]]",
        "    if wrong:",
        '        raise ValueError(f"these have other shapes than planned for: {wrong}")',
        "    placed = {path: lax.with_sharding_constraint(x, NamedSharding(mesh, specs[path])) for path, x in given.items()}",
        *lines(specs, 4, "out_specs = "),
        "    return jax.shard_map(program, mesh=mesh, in_specs=(specs,), out_specs=out_specs)(placed)",
    ]

    def result(k: int) -> Code:
        now, then = weak[k]
        return call("typed", Code(f"results[{k}]"), weak=then) if now or then else Code(f"results[{k}]")

    doc = (plan.__doc__ or "").strip().split("\n")[0].replace('"""', "'''").replace("\\", "\\\\")
    fn = [
        f"def fn({', '.join(arguments.names)}):",
        f'    """{doc or "What the planned function gives."}"""',
        *lines(given, 4, "leaves = jax.tree_util.tree_leaves_with_path(", ")"),
        "    results = run({path_of(keys): x for keys, x in leaves})",
        *lines(skeleton(results, result), 4, "return "),
    ]
    helper = [_TYPED.strip().splitlines()] if any(now or then for now, then in weak) else []
    return [spread, *helper, fn, _ZEROS.strip().splitlines(), _main(arguments)]


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


def _main(arguments: Arguments) -> list[str]:
    first = 'if __name__ == "__main__":'
    if not arguments.plain:
        return [first, "    print(jax.tree.map(jnp.shape, jax.jit(run)({path: zeros(path) for path in ARGUMENTS})))"]
    given = ", ".join(f"arguments[{literal(n)}]" for n in arguments.names)
    return [
        first,
        "    arguments = jax.tree.map_with_path(lambda keys, _: zeros(path_of(keys)), STRUCTURE)",
        *lines(Code(f"jax.tree.map(jnp.shape, jax.jit(fn)({given}))"), 4, "print(", ")"),
    ]
