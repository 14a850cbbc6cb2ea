"""A parallel graph as statements: operators, collectives, loops, and calls of the layers that repeat."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from unity.base.formatting import short
from unity.export.applied import Operand
from unity.export.block import CALLED, Block
from unity.export.errors import ExportError
from unity.export.inner import inputs_of, stem
from unity.export.layers import Call, Item, Layer, items
from unity.export.module import Module, drawn
from unity.export.nested import Loop
from unity.export.policies import policy_code
from unity.export.same import meanings
from unity.export.simplify import simplified
from unity.export.source import Code, assign, call
from unity.export.tracing import Program, piece
from unity.export.units import Unit
from unity.pcg.capture.operator_names import LAYOUT
from unity.pcg.ir.graph import PARALLELIZATION, PCG, Node, Value
from unity.pcg.ir.nested_programs import has
from unity.pcg.operators.kernel_primitive import KERNEL
from unity.pcg.parallel.traffic import step_of

NUMBER = "{number}"  # in a path, the number of a run in a loop
SMALL = 3  # equations of an operator that is written where it is used
NOT_COUNTED = LAYOUT | {"pvary", "convert_element_type"}


class GraphWriter:
    """Writes graphs into blocks of one module; equal operators are traced once."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.programs: dict[Hashable, Program] = {}
        self.names: dict[Hashable, str] = {}
        self.written: dict[str, tuple[Program, Node]] = {}  # functions, and what they must do

    def write(self, block: Block, graph: PCG, operands: Sequence[Code]) -> list[Code]:
        """Writes a graph's statements, and gives its results."""
        env = {Value(n): c for n, c in zip(graph.inputs, operands, strict=True)}
        order, said = items(graph), ""
        k = 0
        while k < len(order):
            item = order[k]
            if isinstance(item, Call):
                run = together(order[k:], item.layer)
                self.layer(block, graph, env, item.layer, run)
                k += len(run)
                continue
            said = self.comment(block, item, graph, said)
            self.unit(block, graph, env, item)
            k += 1
        return [env[v] for v in graph.outputs]

    def comment(self, block: Block, unit: Unit, graph: PCG, said: str) -> str:
        """The operator and the user's line, unless that was just said."""
        text = about(unit.node, graph)
        if text and text != said:
            block.lines.append(" " * block.indent + "# " + text)
        return text or said

    def unit(self, block: Block, graph: PCG, env: dict[Value, Code], unit: Unit) -> None:
        """One operator."""
        self.module.operator = re.sub(r"\W", "_", unit.node.kind)
        try:
            results = self._unit(block, graph, [env[v] for v in unit.operands], unit)
        except ExportError as error:
            operator = unit.node.kind if unit.node.kind == error.operator else f"{unit.node.kind} ({error.operator})"
            raise ExportError(unit.node.source, operator, error.why) from None
        env.update(zip(unit.results, results, strict=True))

    def _unit(self, block: Block, graph: PCG, operands: list[Code], unit: Unit) -> list[Code]:
        node = unit.node
        if node.kind == "view":
            return operands
        if node.body is not None and has(node.body, KERNEL):
            raise ExportError(node.source, node.kind, "it calls a unity.kernel, of which there is no program in plain JAX")
        write = {"scan": self.scan, "remat": self.remat}.get(node.kind)
        if write is not None and not unit.gathers:
            return write(block, graph, operands, unit)
        program = self.program(unit, graph)
        wanted = called(node, operands)
        if small(program):
            found = block.write(program.body, inputs_of(program, operands), keep=True)
            return [r.code if r.code.text.isidentifier() else block.let([wanted], r.code)[0] for r in found]
        key = (title(node), *meanings(program.body), program.varying)
        if key not in self.names:
            given = [stem(c) for c in operands]
            self.names[key] = self.module.function(title(node), program, parameters=given, about=about(node, graph))
            self.written[self.names[key]] = program, node
        name = self.names[key]
        return block.let([wanted] * len(node.tensors), call(name, *operands))

    def program(self, unit: Unit, graph: PCG) -> Program:
        """A unit's local program, traced once for all that are equal."""
        if unit.key not in self.programs:
            self.programs[unit.key] = unit.program(graph)
        return self.programs[unit.key]

    def scan(self, block: Block, graph: PCG, operands: list[Code], unit: Unit) -> list[Code]:
        """A scan over a graph."""
        node = unit.node
        assert node.inside is not None
        inside, at = node.inside, node.attributes
        given = [operand(v, c, graph) for v, c in zip(node.operands, repeated_for(unit, operands), strict=True)]
        steps = [operand(Value(n), Code(""), inside) for n in inside.inputs]
        loop = Loop((int(at["consts"]), int(at["carry"])), at["length"], at["reverse"], at["unroll"])
        return loop.write(block, given, steps, lambda b, inner: self.write(b, inside, [o.code for o in inner]))

    def remat(self, block: Block, graph: PCG, operands: list[Code], unit: Unit) -> list[Code]:
        """A graph that is computed again in the backward pass."""
        node = unit.node
        assert node.inside is not None
        how: dict[str, object] = {} if node.attributes["prevent_cse"] else {"prevent_cse": False}
        if node.policy is not None:
            equation = next(e for e in self.program(unit, graph).body.equations if e.params.get("policy") is not None)
            policy = policy_code(equation)
            how |= {} if policy is None else {"policy": policy}
        decorator = call("partial", Code("jax.checkpoint"), **how) if how else Code("jax.checkpoint")
        given = repeated_for(unit, operands)
        scope = self.module.scope.within()
        parameters = [scope.new(stem(c)) for c in given]
        inner = Block(self.module, scope)
        results = self.write(inner, node.inside, [Code(p) for p in parameters])
        lines_ = drawn("", parameters, inner.lines, results, [decorator], about(node, graph))
        name = self.module.add("computed_again", [lines_])
        return block.let(["result"] * len(results), call(name, *given))

    def layer(self, block: Block, graph: PCG, env: dict[Value, Code], layer: Layer, run: Sequence[Call]) -> None:
        """Runs of one layer, which follow each other."""
        order = sorted(range(len(layer.slots)), key=lambda s: kind_of_slot(layer, s))
        name = self.function_of(layer, graph, env, order)
        wanted = [called(layer.segments[0][i].node, []) for i, _ in layer.results]
        if len(run) == len(layer.segments) > 2 and self.loop(block, env, layer, order, name, wanted):
            return
        for c in run:
            given = [env[layer.given(c.segment)[s]] for s in order]
            results = block.let(wanted, call(name, *given))
            env.update(zip(layer.made(c.segment), results, strict=True))

    def function_of(self, layer: Layer, graph: PCG, env: Mapping[Value, Code], order: Sequence[int]) -> str:
        """The function that one run of a layer is."""
        first, given = layer.segments[0], layer.given(0)
        scope = self.module.scope.within()
        names = {s: scope.new(stem(env[given[s]])) for s in order}
        inner = Block(self.module, scope)
        found: dict[Value, Code] = {}
        for s in order:
            found.update((first[i].operands[j], Code(names[s])) for i, j in layer.slots[s])
        said = ""
        for u in first:
            said = self.comment(inner, u, graph, said)
            self.unit(inner, graph, found, u)
        results = [found[v] for v in layer.made(0)]
        lines_ = drawn("", [names[s] for s in order], inner.lines, results, about=f"One of {len(layer.segments)} equal layers.")
        return self.module.add(_user_function(first) or "layer", [lines_])

    def loop(
        self, block: Block, env: dict[Value, Code], layer: Layer, order: Sequence[int], name: str, wanted: Sequence[str]
    ) -> bool:
        """Writes the runs as a loop over their numbers, if that says what they are given."""
        found = [slot_in_loop(layer, s, env) for s in order]
        carried = {int(str(where)) for kind, where in found if kind == "carried"}
        if any(kind == "" for kind, _ in found) or len(wanted) != len(carried):
            return False
        last = layer.made(len(layer.segments) - 1)
        names = [block.scope.new(w) for w in wanted]
        starts = {int(str(at)): env[layer.given(0)[s]] for s, (kind, at) in zip(order, found, strict=True) if kind == "carried"}
        for k, target in enumerate(names):
            block.lines += assign([target], starts[k], block.indent)
        number = block.scope.new("k")
        texts = [names[int(str(at))] if kind == "carried" else str(at).replace(NUMBER, f"{{{number}}}") for kind, at in found]
        given = [Code(text) for text in texts]
        block.lines.append(f"{' ' * block.indent}for {number} in range({len(layer.segments)}):")
        block.lines += assign(names, call(name, *given), block.indent + 4)
        env.update(zip(last, map(Code, names), strict=True))
        return True


def together(order: Sequence[Item], layer: Layer) -> list[Call]:
    """The runs of a layer that come first, one after the other."""
    found: list[Call] = []
    for item in order:
        if not isinstance(item, Call) or item.layer is not layer:
            break
        found.append(item)
    return found


def slot_in_loop(layer: Layer, slot: int, env: Mapping[Value, Code]) -> tuple[str, object]:
    """What a parameter is in a loop: ("carried", number of the result), ("given", its text), or ("", None) for anything else."""
    values = [layer.given(k)[slot] for k in range(len(layer.segments))]
    if all(v == values[0] for v in values):
        return "given", env[values[0]].text
    before = [layer.made(k) for k in range(len(layer.segments) - 1)]
    if all(v in made for v, made in zip(values[1:], before, strict=True)):
        places = {made.index(v) for v, made in zip(values[1:], before, strict=True)}
        return ("carried", places.pop()) if len(places) == 1 else ("", None)
    if not all(v in env for v in values):
        return "", None
    texts = [env[v].text for v in values]
    if not all(t.startswith('w["') for t in texts):
        return "", None
    return _numbered(texts)


def _numbered(texts: Sequence[str]) -> tuple[str, object]:
    """Texts that differ in a number only, which counts from 0."""
    parts = [re.split(r"(\d+)", t) for t in texts]
    if len({len(p) for p in parts}) != 1:
        return "", None
    differ = [i for i in range(len(parts[0])) if len({p[i] for p in parts}) > 1]
    if not differ or any([p[i] for p in parts] != [str(k) for k in range(len(parts))] for i in differ):
        return "", None
    text = "".join(NUMBER if i in differ else p for i, p in enumerate(parts[0]))
    return "given", text.replace('w["', 'w[f"', 1)


def kind_of_slot(layer: Layer, slot: int) -> tuple[int, int]:
    """What is carried from layer to layer comes first, then what they share, then what each has of its own."""
    values = [layer.given(k)[slot] for k in range(len(layer.segments))]
    carried = values[1] in layer.made(0)
    return (0 if carried else 1 if values[0] == values[1] else 2), slot


def operand(v: Value, c: Code, graph: PCG) -> Operand:
    """A value of a graph as an operand."""
    return Operand(c, v.tensor, frozenset(piece(v, graph.axes).manual_axis_type.varying))


def repeated_for(unit: Unit, operands: Sequence[Code]) -> list[Code]:
    """The operands of a unit's node, in its own order."""
    found = dict(zip(unit.operands, operands, strict=True))
    return [found[v] for v in unit.node.operands]


def small(program: Program) -> bool:
    """Whether an operator is written where it is used."""
    counted = [e for e in simplified(program.body).equations if e.name not in NOT_COUNTED]
    return len(counted) <= SMALL


def called(node: Node, operands: Sequence[Code]) -> str:
    """A name for what an operator gives: what it changes, or its kind."""
    if node.kind in PARALLELIZATION and operands:
        return stem(operands[0])
    return CALLED.get(node.kind, node.kind)


def title(node: Node) -> str:
    """A name for a function: the operator and the user's line."""
    found = re.match(r".*?:(\d+)", node.source)
    return f"{node.kind}_{found[1]}" if found else node.kind


def about(node: Node, graph: PCG) -> str:
    """An operator in words: what it is, where the user wrote it, or along which axes it changes what."""
    if node.kind in PARALLELIZATION:
        if node.kind == "view":
            return ""
        axes = ", ".join(graph.axes[i].name for i in step_of(node, graph.axes).axes)
        return f"{node.kind} over {axes}"
    return f"{node.kind}, {short(node.source)}" if node.source else "" if node.kind == "constant" else node.kind


def _user_function(units: Sequence[Unit]) -> str:
    found = Counter(m[1] for u in units if (m := re.search(r"\((?:.*\.)?(\w+)\)$", u.node.source)))
    return found.most_common(1)[0][0] if found else ""
