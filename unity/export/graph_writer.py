"""The statements of an exported program, written from a parallel graph: operators, collectives, scans, calls of repeated layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from unity.base.errors import ExportError
from unity.base.formatting import short
from unity.export.body_writer import Block, program_operands
from unity.export.checkpoint_policies import policy_code
from unity.export.equivalence import meanings
from unity.export.layers import Item, Layer, LayerCall, Unit, items
from unity.export.module import ModuleWriter, function_lines
from unity.export.nested import ScanLoop, checkpoint_decorator
from unity.export.primitives.primitive_call import Operand
from unity.export.primitives.table import RESULT_NAMES
from unity.export.simplification import simplified
from unity.export.source_code import Code, assign, call, stem
from unity.export.tracing import LocalProgram, piece
from unity.pcg.ir.graph import PARALLELIZATION, PCG, Node, Value
from unity.pcg.ir.nested_programs import has
from unity.pcg.ir.payloads import Remat, Scan
from unity.pcg.operators.kernel_primitive import KERNEL
from unity.pcg.parallel.traffic import step_of
from unity.pcg.types.factors import Role, facts_of
from unity.pcg.types.varying_axes import CASTS

NUMBER = "{number}"  # a placeholder for the loop's counter in a path
SMALL = 3  # equations of an operator that is inlined


class GraphWriter:
    """A writer of graphs into blocks of one module. Equal operators are traced once."""

    def __init__(self, module: ModuleWriter) -> None:
        self.module = module
        self.programs: dict[Hashable, LocalProgram] = {}  # by the key of a unit
        self.names: dict[Hashable, str] = {}  # of functions, by content
        self.layer_functions: dict[Layer, str] = {}
        self.operator_functions: dict[str, tuple[LocalProgram, Node]] = {}  # by name: the program that each must equal

    def write(self, block: Block, graph: PCG, operands: Sequence[Code]) -> list[Code]:
        """Write the statements of a graph, and return its results."""
        env = {Value(n): c for n, c in zip(graph.inputs, operands, strict=True)}
        order, comment = items(graph), ""
        k = 0
        while k < len(order):
            item = order[k]
            if isinstance(item, LayerCall):
                run = _consecutive_calls(order[k:], item.layer)
                self.write_layer(block, graph, env, item.layer, run)
                k += len(run)
                continue
            comment = self.write_comment(block, item, graph, comment)
            results = self.write_unit(block, graph, [env[v] for v in item.operands], item)
            env.update(zip(item.results, results, strict=True))
            k += 1
        return [env[v] for v in graph.outputs]

    def write_comment(self, block: Block, unit: Unit, graph: PCG, last: str) -> str:
        """Write a comment with the operator and the source line, unless it equals the last one, and return it."""
        text = about(unit.node, graph)
        if text and text != last:
            block.lines.append(" " * block.indent + "# " + text)
        return text or last

    def write_unit(self, block: Block, graph: PCG, operands: list[Code], unit: Unit) -> list[Code]:
        """Write one operator, and return its results."""
        self.module.operator = re.sub(r"\W", "_", unit.node.kind)
        try:
            return self._unit_results(block, graph, operands, unit)
        except ExportError as error:
            operator = unit.node.kind if unit.node.kind == error.operator else f"{unit.node.kind} ({error.operator})"
            raise ExportError(unit.node.source, operator, error.why) from None

    def _unit_results(self, block: Block, graph: PCG, operands: list[Code], unit: Unit) -> list[Code]:
        node = unit.node
        if node.kind == "view":
            return operands
        if node.body is not None and has(node.body, KERNEL):
            raise ExportError(node.source, node.kind, "it calls a unity.kernel, of which there is no program in plain JAX")
        write_nested = {"scan": self.write_scan, "remat": self.write_remat}.get(node.kind)
        if write_nested is not None and not unit.rerun:
            return write_nested(block, graph, operands, unit)
        program = self.program(unit, graph)
        preferred = _result_name(node, operands)
        if _is_small(program):
            results = block.write(program.body, program_operands(program, operands), keep=True)
            return [r.code if r.code.text.isidentifier() else block.let([preferred], r.code)[0] for r in results]
        key = (_function_name(node), *meanings(program.body), program.varying)
        if key not in self.names:
            parameters = [stem(c) for c in operands]
            name = self.module.function(_function_name(node), program, parameters=parameters, about=about(node, graph))
            self.names[key] = name
            self.operator_functions[name] = program, node
        return block.let([preferred] * len(node.tensors), call(self.names[key], *operands))

    def program(self, unit: Unit, graph: PCG) -> LocalProgram:
        """Return a unit's local program, traced once for all equal units."""
        if unit.key not in self.programs:
            self.programs[unit.key] = unit.program(graph)
        return self.programs[unit.key]

    def write_scan(self, block: Block, graph: PCG, operands: list[Code], unit: Unit) -> list[Code]:
        """Write a scan over a nested graph, and return its results."""
        node = unit.node
        assert node.inside is not None
        inside, data = node.inside, node.of(Scan)
        loop_operands = [_operand(v, c, graph) for v, c in zip(node.operands, _in_node_order(unit, operands), strict=True)]
        step_operands = [_operand(Value(n), Code(""), inside) for n in inside.inputs]
        loop = ScanLoop((data.consts, data.carry), data.length, data.reverse, data.unroll)

        def write_step(block: Block, operands: list[Operand]) -> list[Code]:
            return self.write(block, inside, [o.code for o in operands])

        return loop.write(block, loop_operands, step_operands, write_step)

    def write_remat(self, block: Block, graph: PCG, operands: list[Code], unit: Unit) -> list[Code]:
        """Write a nested graph that the backward pass recomputes, as a function of the module, and return its results."""
        node = unit.node
        assert node.inside is not None
        policy = None
        if node.policy is not None:
            equation = next(e for e in self.program(unit, graph).body.equations if e.params.get("policy") is not None)
            policy = policy_code(equation)
        decorator = checkpoint_decorator(node.of(Remat).prevent_cse, policy)
        arguments = _in_node_order(unit, operands)
        scope = self.module.scope.within()
        parameters = [scope.new(stem(c)) for c in arguments]
        inner = Block(self.module, scope)
        results = self.write(inner, node.inside, [Code(p) for p in parameters])
        written = function_lines("", parameters, inner.lines, results, [decorator], about(node, graph))
        name = self.module.add("computed_again", [written])
        return block.let(["result"] * len(results), call(name, *arguments))

    def write_layer(self, block: Block, graph: PCG, env: dict[Value, Code], layer: Layer, run: Sequence[LayerCall]) -> None:
        """Write consecutive calls of one layer."""
        order = sorted(range(len(layer.slots)), key=lambda s: _slot_order(layer, s))
        if layer not in self.layer_functions:
            parameters = [stem(env[v]) for v in layer.arguments_of(run[0].segment)]
            self.layer_functions[layer] = self.layer_function(layer, graph, parameters, order)
        name = self.layer_functions[layer]
        preferred = [_result_name(layer.segments[0][i].node, []) for i, _ in layer.results]
        if len(run) == len(layer.segments) > 2 and self.write_loop(block, env, layer, order, name, preferred):
            return
        for c in run:
            values = layer.arguments_of(c.segment)
            results = block.let(preferred, call(name, *(env[values[s]] for s in order)))
            env.update(zip(layer.results_of(c.segment), results, strict=True))

    def layer_function(self, layer: Layer, graph: PCG, preferred: Sequence[str], order: Sequence[int]) -> str:
        """Write the function of a layer, and return its name.

        Args:
            layer: The layer.
            graph: The graph that contains it.
            preferred: For each slot, the name that its parameter gets if it is free.
            order: The slots in the order of the parameters.
        """
        units, scope = layer.segments[0], self.module.scope.within()
        names = {s: scope.new(preferred[s]) for s in order}
        # Keyed by place, not by value: two slots may receive one value in this segment, and different ones in others.
        parameters = {place: Code(names[s]) for s, places in enumerate(layer.slots) for place in places}
        inner, comment = Block(self.module, scope), ""
        env: dict[Value, Code] = {}
        for i, u in enumerate(units):
            comment = self.write_comment(inner, u, graph, comment)
            operands = [parameters[i, j] if (i, j) in parameters else env[v] for j, v in enumerate(u.operands)]
            env.update(zip(u.results, self.write_unit(inner, graph, operands, u), strict=True))
        results = [env[v] for v in layer.results_of(0)]
        doc = f"One of {len(layer.segments)} equal layers."
        written = function_lines("", [names[s] for s in order], inner.lines, results, about=doc)
        return self.module.add(_user_function(units) or "layer", [written])

    def write_loop(
        self, block: Block, env: dict[Value, Code], layer: Layer, order: Sequence[int], name: str, preferred: Sequence[str]
    ) -> bool:
        """Write all calls of a layer as a Python loop, if its arguments follow from the loop's counter; return whether they do."""
        arguments = [_loop_argument(layer, s, env) for s in order]
        carried = {a.result for a in arguments if a is not None and a.result is not None}
        if None in arguments or len(preferred) != len(carried):
            return False
        last = layer.results_of(len(layer.segments) - 1)
        names = [block.scope.new(p) for p in preferred]
        first = layer.arguments_of(0)
        starts = {a.result: env[first[s]] for s, a in zip(order, arguments, strict=True) if a is not None and a.result is not None}
        for k, target in enumerate(names):
            block.lines += assign([target], starts[k], block.indent)
        number = block.scope.new("k")
        texts = [
            a.text.replace(NUMBER, f"{{{number}}}") if a.result is None else names[a.result] for a in arguments if a is not None
        ]
        block.lines.append(f"{' ' * block.indent}for {number} in range({len(layer.segments)}):")
        block.lines += assign(names, call(name, *(Code(text) for text in texts)), block.indent + 4)
        env.update(zip(last, map(Code, names), strict=True))
        return True


def _consecutive_calls(order: Sequence[Item], layer: Layer) -> list[LayerCall]:
    """Return the calls of a layer that come first."""
    calls: list[LayerCall] = []
    for item in order:
        if not isinstance(item, LayerCall) or item.layer is not layer:
            break
        calls.append(item)
    return calls


@dataclass(frozen=True)
class _LoopArgument:
    """An argument of a layer in a loop over its calls: a result of the previous call, by number, or else a text."""

    text: str = ""
    result: int | None = None


def _loop_argument(layer: Layer, slot: int, env: Mapping[Value, Code]) -> _LoopArgument | None:
    """Return a parameter's argument in a loop over all calls of a layer, or None if it does not follow from the loop's counter."""
    values = [layer.arguments_of(k)[slot] for k in range(len(layer.segments))]
    if all(v == values[0] for v in values):
        return _LoopArgument(env[values[0]].text)
    results_before = [layer.results_of(k) for k in range(len(layer.segments) - 1)]
    if all(v in results for v, results in zip(values[1:], results_before, strict=True)):
        places = {results.index(v) for v, results in zip(values[1:], results_before, strict=True)}
        return _LoopArgument(result=places.pop()) if len(places) == 1 else None
    if not all(v in env for v in values):
        return None
    texts = [env[v].text for v in values]
    if not all(t.startswith('w["') for t in texts):
        return None
    return _numbered(texts)


def _numbered(texts: Sequence[str]) -> _LoopArgument | None:
    """Return one text for texts that differ only in a number that counts from 0; None for others."""
    parts = [re.split(r"(\d+)", t) for t in texts]
    if len({len(p) for p in parts}) != 1:
        return None
    differ = [i for i in range(len(parts[0])) if len({p[i] for p in parts}) > 1]
    if not differ or any([p[i] for p in parts] != [str(k) for k in range(len(parts))] for i in differ):
        return None
    text = "".join(NUMBER if i in differ else p for i, p in enumerate(parts[0]))
    return _LoopArgument(text.replace('w["', 'w[f"', 1))


def _slot_order(layer: Layer, slot: int) -> tuple[int, int]:
    """Return a sort key of a layer's parameters: carried ones, then those that all calls share, then others."""
    values = [layer.arguments_of(k)[slot] for k in range(len(layer.segments))]
    carried = values[1] in layer.results_of(0)
    return (0 if carried else 1 if values[0] == values[1] else 2), slot


def _operand(v: Value, c: Code, graph: PCG) -> Operand:
    return Operand(c, v.tensor, frozenset(piece(v, graph.axes).manual_axis_type.varying))


def _in_node_order(unit: Unit, operands: Sequence[Code]) -> list[Code]:
    """Return the expressions of a unit's operands in the order of its node's operands."""
    by_value = dict(zip(unit.operands, operands, strict=True))
    return [by_value[v] for v in unit.node.operands]


def _is_small(program: LocalProgram) -> bool:
    """Return whether an operator has so few equations that it is inlined, not written as a function."""
    equations = simplified(program.body).equations
    counted = [e for e in equations if facts_of(e.name).role not in (Role.LAYOUT, Role.CONVERSION) and e.name not in CASTS]
    return len(counted) <= SMALL


def _result_name(node: Node, operands: Sequence[Code]) -> str:
    """Return a name for an operator's result: its kind's, or for a parallelization operator the operand's."""
    if node.kind in PARALLELIZATION and operands:
        return stem(operands[0])
    return RESULT_NAMES.get(node.kind, node.kind)


def _function_name(node: Node) -> str:
    """Return a name for an operator's function: its kind and the number of the source line."""
    line = re.match(r".*?:(\d+)", node.source)
    return f"{node.kind}_{line[1]}" if line else node.kind


def about(node: Node, graph: PCG) -> str:
    """Describe an operator by its kind and source line, or a parallelization operator by its kind and mesh axes."""
    if node.kind in PARALLELIZATION:
        if node.kind == "view":
            return ""
        axes = ", ".join(graph.axes[i].name for i in step_of(node, graph.axes).axes)
        return f"{node.kind} over {axes}"
    return f"{node.kind}, {short(node.source)}" if node.source else "" if node.kind == "constant" else node.kind


def _user_function(units: Sequence[Unit]) -> str:
    """Return the name of the user's function that most operators are from, or ""."""
    counts = Counter(m[1] for u in units if (m := re.search(r"\((?:.*\.)?(\w+)\)$", u.node.source)))
    return counts.most_common(1)[0][0] if counts else ""
