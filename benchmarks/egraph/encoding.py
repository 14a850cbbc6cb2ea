"""A captured program as facts of an e-graph, and an extracted term as a program again.

An equation is read as the backtracking search reads it (`Reading`): as an operator of the rules on operands that are seen through
reshapes and transposes, which are terms of their own here. What is no operator of the rules is opaque: a term with the number of
its equation. Parameters that rules do not see (a precision, a layout) are a word, of which `examples` has an equation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
from jax import lax
from jax.core import ShapedArray
from jax.extend import core

from benchmarks.egraph.rules import CLIP, LANGUAGE, place, shape_of, size
from unity.pcg.ir.program import Atom, Body, Equation, Literal, close
from unity.pcg.operators.promised_reads import promised
from unity.pcg.types.parallel_type import Shape
from unity.substitutions.language.promises import CLIPPED, PROMISED
from unity.substitutions.language.rearrangement import (
    Rearrangement,
    after,
    dimensions,
    reshaped,
    resized,
    target_dimension,
    transposed,
)
from unity.substitutions.language.term import Apply, Variable
from unity.substitutions.language.typecheck import TensorType
from unity.substitutions.language.vocabulary import FUNCTIONS, VOCABULARY
from unity.substitutions.rewriting.reading import Application, Reading, Viewed, clamping, rearrangement_of
from unity.substitutions.rewriting.writing import WRITERS, ViewedArray, unarranged

OPAQUE = core.Primitive("opaque")  # stands for an equation of the captured program while a program is written
OPAQUE.multiple_results = True
OPAQUE.def_abstract_eval(lambda *_, number, types: [ShapedArray(t.shape, t.dtype) for t in types])

ELEMENTWISE = ("Add", "Sub", "Mul")


def vector(shape: Shape) -> str:
    return f"(vec-of {' '.join(map(str, shape))})" if shape else "(vec-empty)"


def permutation_of(view: Rearrangement) -> tuple[int, ...] | None:
    """Return the permutation that a view is, if it is a transpose of all dimensions."""
    origins = dimensions(view)
    if origins is None or len(view.source) != len(view.target) or any(len(g) > 1 for g in origins):
        return None
    ones = iter(d for d, n in enumerate(view.source) if n == 1)
    permutation = tuple(g[0] if g else next(ones) for g in origins)
    return permutation if transposed(view.source, permutation) == view else None


@dataclass
class Encoding:
    """The text of a program's facts, and everything that its words and numbers stand for."""

    body: Body
    lines: list[str] = field(default_factory=list)
    examples: dict[str, Equation] = field(default_factory=dict)
    opaque: list[Equation] = field(default_factory=list)
    constants: dict[str, tuple[int, Literal]] = field(default_factory=dict)
    permutations: set[tuple[int, ...]] = field(default_factory=set)
    arities: set[int] = field(default_factory=set)
    convolutions: set[tuple[int, str]] = field(default_factory=set)
    words: dict[tuple[str, str], str] = field(default_factory=dict)

    @cached_property
    def text(self) -> str:
        """The language, the rules of shapes and views, and the facts."""
        reading = Reading(self.body)
        for k, v in enumerate(self.body.inputs):
            self._bind(f"$v{v}", f"(Input {k})", self.body.tensors[v].shape)
        for e in self.body.equations:
            self._equation(reading, e)
        for k, a in enumerate(self.body.outputs):
            self.lines.append(f"(set (root {k}) {self._term(reading.origin(a))})")
        heads = [LANGUAGE, "(constructor Get (i64 T) T)", "(function root (i64) T :merge old)"]
        heads += [f"(constructor Opaque{n} (i64{' T' * n}) T)" for n in sorted(self.arities)]
        return "\n".join([*heads, *self._types(), *self._views(), *self.lines])

    def _bind(self, name: str, term: str, shape: Shape) -> None:
        self.lines += [f"(let {name} {term})", f"(set (shape {name}) {vector(shape)})"]

    def _atom(self, a: Atom) -> str:
        if not isinstance(a, Literal):
            return f"$v{a}"
        if a.key not in self.constants:
            number = len(self.constants)
            self.constants[a.key] = number, a
            self._bind(f"$c{number}", f"(Const {number})", a.tensor.shape)
        return f"$c{self.constants[a.key][0]}"

    def _term(self, x: Viewed) -> str:
        return self._seen(x.view, self._atom(x.atom))

    def _seen(self, view: Rearrangement, term: str) -> str:
        if view.identity:
            return term
        permutation = permutation_of(view)
        if permutation is not None:
            return self._permuted(permutation, term)
        if view.reshape:
            return f"(Reshape {vector(view.target)} {term})"
        if view.sizes != view.source:
            term = f"(Reshape {vector(view.sizes)} {term})"
        term = self._permuted(view.permutation, term)
        permuted = tuple(view.sizes[p] for p in view.permutation)
        return term if permuted == view.target else f"(Reshape {vector(view.target)} {term})"

    def _permuted(self, permutation: tuple[int, ...], term: str) -> str:
        self.permutations.add(permutation)
        return f'(Perm "{",".join(map(str, permutation))}" {term})'

    def _equation(self, reading: Reading, e: Equation) -> None:
        application = reading.read(e)
        if application is not None:
            for k, v in enumerate(e.results):
                term = self._application(application, k)
                self.lines.append(f"(let $v{v} {self._seen(application.views[k].inverse(), term)})")
                self.lines.append(f"(set (shape $v{v}) {vector(self.body.tensors[v].shape)})")
            return
        if rearrangement_of(e, self.body) is not None:
            x = reading.origin(e.results[0])
            if x.atom != e.results[0]:
                self.lines.append(f"(let $v{e.results[0]} {self._term(x)})")
                return
        self.arities.add(len(e.operands))
        operands = " ".join(self._term(reading.origin(a)) for a in e.operands)
        self.lines.append(f"(let $e{len(self.opaque)} (Opaque{len(e.operands)} {len(self.opaque)} {operands}))")
        for k, v in enumerate(e.results):
            self._bind(f"$v{v}", f"(Get {k} $e{len(self.opaque)})", self.body.tensors[v].shape)
        self.opaque.append(e)

    def _application(self, x: Application, result: int) -> str:
        operands = [self._term(o) for o in x.operands]
        name = x.operator
        if name in ("add", "sub", "mul", "scale", "bias"):
            return f"({name.capitalize()} {' '.join(operands)})"
        if name == "map":
            word = str(x.attributes[0])
            word = word if word in FUNCTIONS else self._word("f", word, x.equation)
            self.examples.setdefault(word, x.equation)
            return f'(Map "{word}" {operands[0]})'
        if name in ("concat", "sum"):
            return f"({name.capitalize()} {x.attributes[0]} {' '.join(operands)})"
        if name == "split":
            d, (operand,) = int(x.attributes[0]), x.operands
            parts = [self.body.tensors[v].shape[d] for v in x.results]
            at = parts[0] if x.first == 0 else operand.view.target[d] - parts[0]
            return f"(Split{x.first + result} {d} {at} {operands[0]})"
        if name == "matmul":
            return f'(Matmul "{self._word("m", x.manner, x.equation)}" {" ".join(operands)})'
        if name == "conv2d":
            groups, stride, padding = x.attributes
            self.convolutions.add((int(groups), str(padding)))
            word = self._word("c", x.manner + str(x.equation.params["dimension_numbers"]), x.equation)
            return f'(Conv "{word}" {groups} {stride} "{padding}" {" ".join(operands)})'
        assert name == "embedding"
        table, ids = operands
        if x.manner == PROMISED:
            x = clamping(x)
            self.examples[CLIP] = x.equation
            return f'(Promised (Embedding "{CLIP}" {table} {ids}) {ids} {table})'
        word = CLIP if x.manner == CLIPPED else self._word("l", x.manner, x.equation)
        self.examples.setdefault(word, x.equation)
        return f'(Embedding "{word}" {table} {ids})'

    def _word(self, prefix: str, text: str, example: Equation) -> str:
        """Return a short word for further parameters, given as text."""
        word = self.words.setdefault((prefix, text), f"{prefix}{len(self.words)}")
        self.examples.setdefault(word, example)
        return word

    def _types(self) -> list[str]:
        """Return the rules by which the shape of every term follows from those of its operands."""
        forms = {
            "(Add x y)": ("add", ()), "(Sub x y)": ("sub", ()), "(Mul x y)": ("mul", ()), "(Map f x)": ("map", ()),
            "(Scale x y)": ("scale", ()), "(Bias x y)": ("bias", ()), "(Matmul m x y)": ("matmul", ()),
            '(Conv m g k "same" x y)': ("conv2d", ("g", "k", '"same"')),
            '(Conv m g k "valid" x y)': ("conv2d", ("g", "k", '"valid"')),
            "(Concat d x y)": ("concat", ("d",)), "(Split0 d n x)": ("split", ("d", "n")), "(Split1 d n x)": ("split", ("d", "n")),
            "(Sum d x)": ("sum", ("d",)), "(Embedding m x y)": ("embedding", ()), "(Within x y)": ("within", ()),
            "(Behind x y)": ("behind", ()), "(Enlarge k x)": ("enlarge", ("k",)),
        }  # fmt: skip
        rules = ["(rule ((= e (Reshape s x))) ((set (shape e) s)) :ruleset types)"]
        rules.append("(rule ((= e (Promised x i y)) (= s (shape x))) ((set (shape e) s)) :ruleset types)")
        for form, (operator, attributes) in forms.items():
            shapes = tuple(f"s{x}" for x in "xy" if f" {x}" in form)
            facts = " ".join(f"(= s{x} (shape {x}))" for x in "xy" if f" {x}" in form)
            shape = shape_of(operator, attributes, shapes, int("Split1" in form))
            rules.append(f"(rule ((= e {form}) {facts} (= s {shape})) ((set (shape e) s)) :ruleset types)")
        return rules

    def _views(self) -> list[str]:
        """Return rules that compose views and move them through elementwise operators, joins and splits, both ways."""
        rules = ["(rewrite (Reshape s (Reshape t x)) (Reshape s x) :ruleset views)"]

        def view(term: str, *facts: str, same: str) -> None:
            rules.append(f"(rule ((= e {term}) {' '.join(facts)}) ((union e {same})) :ruleset views)")

        s_x, s_y, last, last_x, last_y = "(= sx (shape x))", "(= sy (shape y))", *(size(s, "-1") for s in ("s", "sx", "sy"))
        view("(Reshape s x)", "(= s (shape x))", same="x")
        for name in ELEMENTWISE:
            view(f"(Reshape s ({name} x y))", same=f"({name} (Reshape s x) (Reshape s y))")
            view(f"({name} (Reshape s x) (Reshape s y))", "(= (shape x) (shape y))", same=f"(Reshape s ({name} x y))")
        view("(Reshape s (Map f x))", same="(Map f (Reshape s x))")
        view("(Map f (Reshape s x))", same="(Reshape s (Map f x))")
        view("(Reshape s (Scale x c))", "(> (vec-length s) 0)", same="(Scale (Reshape s x) c)")
        view("(Scale (Reshape s x) c)", s_x, "(> (vec-length sx) 0)", same="(Reshape s (Scale x c))")
        view("(Reshape s (Bias x b))", s_x, f"(= {last} {last_x})", "(> (vec-length s) 1)", same="(Bias (Reshape s x) b)")
        view("(Bias (Reshape s x) b)", s_x, f"(= {last} {last_x})", "(> (vec-length sx) 1)", same="(Reshape s (Bias x b))")
        parts = f"(= s0 {_last('s', last_x)})", f"(= s1 {_last('s', last_y)})"
        joined = "(Concat -1 (Reshape s0 x) (Reshape s1 y))"
        view("(Reshape s (Concat -1 x y))", s_x, s_y, f"(= {last} (+ {last_x} {last_y}))", *parts, same=joined)
        for k, n in (("0", "n"), ("1", f"(- {last_x} n)")):
            whole, part = f"(= t {_last('s', last_x)})", f"(= t {_last('s', n)})"
            view(f"(Reshape s (Split{k} -1 n x))", s_x, f"(= {last} {n})", whole, same=f"(Split{k} -1 n (Reshape t x))")
            view(f"(Split{k} -1 n (Reshape s x))", s_x, f"(= {last} {last_x})", part, same=f"(Reshape t (Split{k} -1 n x))")
        return rules + self._permutations()

    def _permutations(self) -> list[str]:
        rules, every = [], closure(self.permutations)
        for p in every:
            own, rank = _spelled(p), len(p)
            shape = " ".join(f"(vec-get s {d})" for d in p)
            rules.append(f'(rule ((= e (Perm "{own}" x)) (= s (shape x))) ((set (shape e) (vec-of {shape}))) :ruleset types)')
            if p == tuple(range(rank)):
                rules.append(f'(rewrite (Perm "{own}" x) x :ruleset views)')
            rules += [
                f'(rewrite (Perm "{own}" (Perm "{_spelled(q)}" x)) (Perm "{_spelled(tuple(q[d] for d in p))}" x) :ruleset views)'
                for q in every
                if len(q) == rank
            ]
            for name in ELEMENTWISE:
                moved = f'({name} (Perm "{own}" x) (Perm "{own}" y))'
                rules.append(f'(birewrite (Perm "{own}" ({name} x y)) {moved} :ruleset views)')
            rules.append(f'(birewrite (Perm "{own}" (Map f x)) (Map f (Perm "{own}" x)) :ruleset views)')
            rules.append(f'(birewrite (Perm "{own}" (Scale x c)) (Scale (Perm "{own}" x) c) :ruleset views)')
            for d in range(rank):
                old, new = p[d] - rank, d - rank
                rules += [
                    f'(birewrite (Perm "{own}" ({name} {old} {n}x)) ({name} {new} {n}(Perm "{own}" x)) :ruleset views)'
                    for name, n in (("Split0", "n "), ("Split1", "n "))
                ]
                rules.append(
                    f'(birewrite (Perm "{own}" (Concat {old} x y)) (Concat {new} (Perm "{own}" x) (Perm "{own}" y)) :ruleset views)'
                )
            if p[-1] == rank - 1:
                rules.append(f'(birewrite (Perm "{own}" (Bias x b)) (Bias (Perm "{own}" x) b) :ruleset views)')
        return rules


def _last(s: str, n: str) -> str:
    return f"(vec-set {s} {place(s, '-1')} {n})"


def _spelled(p: tuple[int, ...]) -> str:
    return ",".join(map(str, p))


def closure(permutations: Collection[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the permutations that follow from some by inversion and composition."""
    every = set(permutations)
    every |= {tuple(p.index(d) for d in range(len(p))) for p in every}
    while True:
        more = {tuple(q[d] for d in p) for p in every for q in every if len(p) == len(q)} - every
        if not more:
            return sorted(every)
        every |= more


@dataclass(frozen=True)
class Operation:
    """An operator of a term: a constructor with attributes, on operands that are numbered."""

    constructor: str
    attributes: tuple[Any, ...]
    operands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.constructor}{list(self.attributes)}"


@dataclass
class Writer:
    """The translation of a term to JAX, with pending rearrangements as the backtracking search's replacements have them."""

    encoding: Encoding
    inputs: Sequence[jax.Array]
    chosen: Mapping[str, Operation]
    shapes: Mapping[str, Shape]
    written: dict[str, Any] = field(default_factory=dict)
    word: str = ""
    splits: dict[tuple, Sequence[jax.Array]] = field(default_factory=dict)

    @cached_property
    def parts(self) -> Counter[tuple]:
        """The number of parts that are read of every operand that is split at a place."""
        splits = dict.fromkeys(o for o in self.chosen.values() if o.constructor in ("Split0", "Split1"))
        return Counter((o.attributes, o.operands) for o in splits)

    def example(self, name: str) -> Equation | None:
        """Return the equation whose further parameters the current operator copies."""
        return self.encoding.examples.get(self.word)

    def of(self, key: str) -> Any:
        """Return the value of a class."""
        stack = [key]
        while stack:
            top = stack[-1]
            missing = [k for k in self.chosen[top].operands if k not in self.written]
            if top in self.written or not missing:
                stack.pop()
                if top not in self.written:
                    o = self.chosen[top]
                    self.written[top] = apply(
                        self, o, [self.written[k] for k in o.operands], [self.shapes.get(k, ()) for k in o.operands]
                    )
            else:
                stack += missing
        return self.written[key]


def apply(writer: Writer, o: Operation, operands: list[Any], shapes: list[Shape]) -> Any:
    """Return the value of an operator; of an opaque one, all results."""
    name, attributes, encoding = o.constructor, o.attributes, writer.encoding
    if name == "Input":
        return unarranged(writer.inputs[attributes[0]])
    if name == "Const":
        literal = next(x for k, x in encoding.constants.values() if k == attributes[0])
        return unarranged(jax.numpy.asarray(literal.value, literal.tensor.dtype))
    if name == "Get":
        return unarranged(operands[0][attributes[0]])
    if name.startswith("Opaque"):
        types = tuple(encoding.body.tensors[v].struct for v in encoding.opaque[attributes[0]].results)
        return OPAQUE.bind(*(x.value for x in operands), number=attributes[0], types=types)
    if name in ("Perm", "Reshape"):
        (x,) = operands
        view = transposed(shapes[0], attributes[0]) if name == "Perm" else reshaped(shapes[0], attributes[0])
        both = after(view, x.view)
        return ViewedArray(x.array, both) if both is not None else ViewedArray(x.value, view)
    if name == "Promised":
        rows, ids, _ = operands
        return unarranged(promised(rows.value, ids.value, shapes[2][0]))
    if name in ("Split0", "Split1"):
        return _part(writer, o, operands[0])
    return _vocabulary(writer, o, operands, shapes)


def _vocabulary(writer: Writer, o: Operation, operands: list[ViewedArray], shapes: list[Shape]) -> ViewedArray:
    name = {"conv": "conv2d"}.get(o.constructor.lower(), o.constructor.lower())
    attributes, writer.word = o.attributes, ""
    if name in ("matmul", "conv2d", "embedding"):
        writer.word, *attributes = attributes
    if name == "map":
        writer.word = attributes[0]
    types = [TensorType(s, (), str(x.array.dtype)) for s, x in zip(shapes, operands, strict=True)]
    term = Apply(name, tuple(attributes), tuple(Variable(f"x{k}") for k in range(len(operands))))
    write: Any = WRITERS.get(name)
    results = write(writer, term, operands, types) if write is not None else None
    if results is None:
        return unarranged(VOCABULARY[name].run(*attributes, *(x.value for x in operands)))
    return results[0]


def _part(writer: Writer, o: Operation, x: ViewedArray) -> ViewedArray:
    """Return a part of a split. Two parts that are read are one equation, as in a captured program: slices are not joined again."""
    d, at = o.attributes
    place, first = target_dimension(x.view.inverse(), d % len(x.view.target)), o.constructor == "Split0"
    if place is None:
        x, place = unarranged(x.value), d % len(x.view.target)
    n = x.array.shape[place]
    if writer.parts[o.attributes, o.operands] < 2:
        part = lax.slice_in_dim(x.array, 0 if first else at, at if first else n, axis=place)
    else:
        if (o.attributes, o.operands) not in writer.splits:
            writer.splits[o.attributes, o.operands] = lax.split(x.array, (at, n - at), place)
        part = writer.splits[o.attributes, o.operands][0 if first else 1]
    return ViewedArray(part, resized(x.view, place, part.shape[place]))


def program(encoding: Encoding, chosen: Mapping[str, Operation], shapes: Mapping[str, Shape], roots: Sequence[str]) -> Body:
    """Return the program that a choice of an operator for every class is."""
    needed, stack = dict[str, Operation](), list(roots)
    while stack:
        key = stack.pop()
        if key not in needed:
            needed[key] = chosen[key]
            stack += chosen[key].operands

    def run(*arrays: jax.Array) -> list[jax.Array]:
        writer = Writer(encoding, arrays, needed, shapes)
        return [writer.of(key).value for key in roots]

    body = encoding.body
    written = close(jax.make_jaxpr(run)(*(body.tensors[v].struct for v in body.inputs)))
    own = encoding.opaque
    equations = (
        replace(own[e.params["number"]], operands=e.operands, results=e.results) if e.name == "opaque" else e
        for e in written.equations
    )
    return replace(written, equations=tuple(equations))
