"""Translation of the library's rules to egglog, with everything that makes a replacement well-typed as a precondition.

A tensor is a term of the sort `T`; `shape` is an analysis of its class. A `split` has two constructors, one for each part, and says
where it divides: a rule's seam becomes an expression of sizes. Convolutions have literal groups and paddings, so that a rule is
translated once for each of those that a program has.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from unity.substitutions.language.promises import computes_with_indices
from unity.substitutions.language.rule import Different, EqualSizes, Rank
from unity.substitutions.language.term import Apply, Attribute, Term, Variable, attribute_variables, substitute
from unity.substitutions.language.vocabulary import VOCABULARY
from unity.substitutions.rewriting.occurrences import Pattern

MANNERED = ("matmul", "conv2d", "embedding")
CLIP = "clip"  # the manner of a look-up that clamps

CONSTRUCTORS = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "map": "Map", "scale": "Scale", "bias": "Bias", "matmul": "Matmul",
    "conv2d": "Conv", "concat": "Concat", "split": "Split", "sum": "Sum", "embedding": "Embedding", "within": "Within",
    "behind": "Behind", "enlarge": "Enlarge",
}  # fmt: skip

LANGUAGE = """
(sort Shape (Vec i64))
(sort T)
(constructor Input (i64) T)
(constructor Const (i64) T)
(constructor Add (T T) T)
(constructor Sub (T T) T)
(constructor Mul (T T) T)
(constructor Map (String T) T)
(constructor Scale (T T) T)
(constructor Bias (T T) T)
(constructor Matmul (String T T) T)
(constructor Conv (String i64 i64 String T T) T)
(constructor Concat (i64 T T) T)
(constructor Split0 (i64 i64 T) T)
(constructor Split1 (i64 i64 T) T)
(constructor Sum (i64 T) T)
(constructor Embedding (String T T) T)
(constructor Promised (T T T) T)
(constructor Within (T T) T)
(constructor Behind (T T) T)
(constructor Enlarge (i64 T) T)
(constructor Perm (String T) T)
(constructor Reshape (Shape T) T)
(function shape (T) Shape :merge old)
(ruleset types)
(ruleset views)
"""


class UntranslatedError(Exception):
    """A rule that has no faithful translation."""


def place(shape: str, dim: str) -> str:
    """Return the position, from the front, of a dimension that is counted from the end."""
    return f"(+ (vec-length {shape}) {dim})"


def size(shape: str, dim: str) -> str:
    return f"(vec-get {shape} {place(shape, dim)})"


def resized(shape: str, dim: str, n: str) -> str:
    return f"(vec-set {shape} {place(shape, dim)} {n})"


def shape_of(operator: str, attributes: tuple[str, ...], shapes: tuple[str, ...], part: int = 0) -> str:
    """Return the shape of an operator's result, from its operands' shapes."""
    if operator in ("add", "sub", "mul", "map", "scale", "bias"):
        return shapes[0]
    if operator == "matmul":
        return resized(shapes[0], "-1", size(shapes[1], "-1"))
    if operator == "concat":
        return resized(shapes[0], attributes[0], f"(+ {size(shapes[0], attributes[0])} {size(shapes[1], attributes[0])})")
    if operator == "split":
        d, at = attributes
        return resized(shapes[0], d, at if part == 0 else f"(- {size(shapes[0], d)} {at})")
    if operator == "sum":
        return f"(vec-remove {shapes[0]} {place(shapes[0], attributes[0])})"
    if operator == "embedding":
        return f"(vec-push {shapes[1]} {size(shapes[0], '-1')})"
    if operator in ("within", "behind"):
        return shapes[1]
    if operator == "enlarge":
        return resized(resized(shapes[0], "-1", attributes[0]), "-2", attributes[0])
    if operator == "conv2d":
        (_, stride, padding), (x, w) = attributes, shapes

        def along(d: str) -> str:
            n = size(x, d) if padding == '"same"' else f"(+ (- {size(x, d)} {size(w, d)}) 1)"
            return f"(/ (+ {n} (- {stride} 1)) {stride})"

        return f"(vec-of {size(x, '-4')} {size(w, '-4')} {along('-2')} {along('-1')})"
    raise UntranslatedError(f"{operator} has no shape")


def requirements(operator: str, attributes: tuple[str, ...], shapes: tuple[str, ...]) -> Iterator[str]:
    """Yield the facts under which an operator takes operands of these shapes."""
    if operator in ("add", "sub", "mul"):
        yield f"(= {shapes[0]} {shapes[1]})"
    elif operator == "scale":
        yield f"(= 0 (vec-length {shapes[1]}))"
    elif operator == "bias":
        yield f"(= {shapes[1]} (vec-of {size(shapes[0], '-1')}))"
        yield f"(> (vec-length {shapes[0]}) 1)"
    elif operator == "matmul":
        x, y = shapes
        yield f"(= {size(x, '-1')} {size(y, '-2')})"
        yield "(= {} {})".format(*(resized(resized(s, "-1", "0"), "-2", "0") for s in shapes))
    elif operator == "concat":
        yield "(= {} {})".format(*(resized(s, attributes[0], "0") for s in shapes))
    elif operator == "split":
        yield f"(< {attributes[1]} {size(shapes[0], attributes[0])})"
        yield f"(> {attributes[1]} 0)"
    elif operator == "embedding":
        yield f"(= 2 (vec-length {shapes[0]}))"
    elif operator == "enlarge":
        (w,), (k,) = shapes, attributes
        yield f"(= 4 (vec-length {w}))"
        for d in ("-1", "-2"):
            yield f"(<= {size(w, d)} {k})"
            yield f"(= 0 (% (- {k} {size(w, d)}) 2))"
        yield f"(!= {w} {resized(resized(w, '-1', k), '-2', k)})"
    elif operator == "conv2d":
        (groups, _, _), (x, w) = attributes, shapes
        g = size(x, "-3") if groups == "0" else groups
        yield f"(= {size(x, '-3')} (* {g} {size(w, '-3')}))"
        yield f"(= 0 (% {size(w, '-4')} {g}))"


@dataclass
class _Translation:
    """The facts of a rule so far, and names of terms, of their shapes, and of the places where variables are split."""

    different: Collection[frozenset[str]]
    clamps: bool
    facts: list[str] = field(default_factory=list)
    names: dict[Term, str] = field(default_factory=dict)
    shapes: dict[Term, str] = field(default_factory=dict)
    manners: dict[str, str] = field(default_factory=dict)
    places: dict[tuple[Term, str], str] = field(default_factory=dict)
    left: bool = True

    def attribute(self, term: Apply, position: int) -> str:
        value = term.attributes[position]
        if isinstance(value, int):
            return str(value)
        return f"a_{value}" if VOCABULARY[term.operator].is_variable(position, value) else f'"{value}"'

    def attributes(self, term: Apply) -> tuple[str, ...]:
        own = tuple(self.attribute(term, k) for k in range(len(term.attributes)))
        if term.operator != "split":
            return own
        at = self.seam(term.operands[0], own[0])
        return (*own, at)

    def seam(self, term: Term, d: str) -> str:
        """Return where a term is divided along a dimension."""
        if isinstance(term, Apply):
            inner = self._inner_seam(term, d)
            if inner is not None:
                return inner
        if (term, d) not in self.places:
            if not self.left:
                raise UntranslatedError(f"nothing says where {term} is split")
            self.places[term, d] = f"at{len(self.places)}"
        return self.places[term, d]

    def _inner_seam(self, term: Apply, d: str) -> str | None:
        own = tuple(self.attribute(term, k) for k in range(len(term.attributes)))
        x, *others = term.operands
        y = others[0] if others else x
        if term.operator in ("map", "scale", "bias", "add", "sub", "mul"):
            return self.seam(x, d)
        if term.operator == "concat":
            if own[0] == d:
                return size(self.shape(x), d)
            literal = own[0].startswith("-") and d.startswith("-")
            return self.seam(x, d) if literal or frozenset((own[0], d)) in self.different else None
        if term.operator == "matmul" and d.startswith("-"):
            return self.seam(y if d == "-1" else x, d)
        if term.operator == "conv2d" and d in ("-3", "-4"):
            return self.seam(x, d) if d == "-4" else self.seam(y, "-4")
        if term.operator == "sum" and own[0] in ("-1", "-2") and d == "-1":
            return self.seam(x, "-2" if own[0] == "-1" else "-1")
        if term.operator == "embedding" and d in ("-1", "-2"):
            return self.seam(x, "-1") if d == "-1" else self.seam(y, "-1")
        if term.operator == "split" and own[0] != d:
            literal = own[0].startswith("-") and d.startswith("-")
            return self.seam(x, d) if literal or frozenset((own[0], d)) in self.different else None
        return None

    def shape(self, term: Term) -> str:
        """Return the name of a term's shape, and add the fact that computes it."""
        if term not in self.shapes:
            assert isinstance(term, Apply)
            operands = tuple(self.shape(t) for t in term.operands)
            self.facts.append(f"(= s{len(self.shapes)} {shape_of(term.operator, self.attributes(term), operands, term.result)})")
            self.shapes[term] = f"s{len(self.shapes)}"
        return self.shapes[term]

    def call(self, term: Apply, operands: list[str]) -> str:
        constructor = CONSTRUCTORS.get(term.operator)
        if constructor is None:
            raise UntranslatedError(f"{term.operator} is no constructor")
        attributes = list(self.attributes(term))
        if term.operator == "split":
            constructor += str(term.result)
        if term.operator in MANNERED:
            if self.left:
                clip = f'"{CLIP}"' if term.operator == "embedding" and self.clamps else f"m_{term.operator}"
                self.manners.setdefault(term.operator, clip)
            if term.operator not in self.manners:
                raise UntranslatedError(f"{term.operator} has no example")
            attributes.insert(0, self.manners[term.operator])
        return f"({' '.join([constructor, *attributes, *operands])})"

    def matched(self, term: Term) -> str:
        """Return the name of a term of the matched side, and add its facts."""
        if term in self.names:
            return self.names[term]
        if isinstance(term, Variable):
            name = f"v_{term.name}"
            self.facts.append(f"(= s_{term.name} (shape {name}))")
            self.shapes[term] = f"s_{term.name}"
        else:
            operands = [self.matched(t) for t in term.operands]
            name = f"t{len(self.names)}"
            self.facts.append(f"(= {name} {self.call(term, operands)})")
            self.facts.append(f"(= s_{name} (shape {name}))")
            self.shapes[term] = f"s_{name}"
        self.names[term] = name
        return name

    def written(self, term: Term) -> str:
        """Return a term of the other side, and add the facts that make it well-typed."""
        if term in self.names:
            return self.names[term]
        assert isinstance(term, Apply)
        operands = [self.written(t) for t in term.operands]
        shapes = tuple(self.shape(t) for t in term.operands)
        self.facts.extend(requirements(term.operator, self.attributes(term), shapes))
        self.shape(term)
        return self.call(term, operands)


def translated(pattern: Pattern, convolutions: Collection[tuple[int, str]], ruleset: str) -> list[str]:
    """Return a pattern as rules of egglog, one for every kind of convolution (groups and padding) that it may be about.

    Raises UntranslatedError, with the reason.
    """
    if pattern.dropped:
        raise UntranslatedError("whether gradients stay finite depends on the rest of the program")
    kinds = attribute_variables(pattern.left)
    groups = [name for name, kind in kinds.items() if kind == "groups"]
    paddings = [name for name, kind in kinds.items() if kind == "padding"]
    choices = dict.fromkeys(
        (*((n, g) for n in groups), *((n, p) for n in paddings)) for g, p in (convolutions if groups or paddings else [(0, "")])
    )
    return [_rule(pattern, dict(choice), f"{pattern} {k}", ruleset) for k, choice in enumerate(choices)]


def _rule(pattern: Pattern, values: dict[str, Attribute], name: str, ruleset: str) -> str:
    left, right = (substitute(side, {}, values) for side in (pattern.left, pattern.right))
    different = [frozenset(_dim(x) for x in (c.left, c.right)) for c in pattern.rule.conditions_of(Different)]
    translation = _Translation(different, computes_with_indices(pattern.rule))
    roots = [translation.matched(t) for t in left]
    facts = translation.facts
    facts += [f"(!= {' '.join(sorted(pair))})" for pair in different]
    for c in pattern.rule.conditions:
        if isinstance(c, EqualSizes):
            facts.append(f"(= {size(f's_{c.tensor}', str(c.dim))} {size(f's_{c.other}', str(c.other_dim))})")
        elif isinstance(c, Rank):
            facts.append(f"(= {c.rank} (vec-length s_{c.tensor}))")
    facts += [f"(!= {a} {b})" for a, b in itertools.combinations(roots, 2)]
    if pattern.mirrors:  # one of the two orders of parts that a rule exchanges
        parts = (
            roots if len(roots) == 2 else [translation.names[t] for t in (left[0].operands if isinstance(left[0], Apply) else ())]
        )
        if len(parts) == 2 and parts[0] != parts[1]:
            facts.append(f"(= {parts[1]} (ordering-max {parts[0]} {parts[1]}))")
    translation.left = False
    actions = []
    for root, old, new in zip(roots, left, right, strict=True):
        actions.append(f"(union {root} {translation.written(new)})")
        facts.append(f"(= {translation.shape(old)} {translation.shape(new)})")
    return f'(rule ({" ".join(dict.fromkeys(facts))}) ({" ".join(actions)}) :ruleset {ruleset} :name "{name}")'


def _dim(value: str | int) -> str:
    text = str(value)
    return text if text.lstrip("-").isdigit() else f"a_{text}"
