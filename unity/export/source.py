"""Python source as small values: expressions that know their precedence, laid out in lines as formatters do it."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

WIDTH = 120
ATOM, POWER, UNARY, TIMES, PLUS, SHIFT, AND, XOR, OR, COMPARE, NOT, TUPLE = range(100, -20, -10)


@dataclass(frozen=True)
class Code:
    """An expression: its text on one line, how tightly it binds, and the parts of a call or a collection at its end, which may be
    broken."""

    text: str
    level: int = ATOM
    head: str = ""
    items: tuple[Code, ...] = ()
    close: str = ""
    collection: bool = False

    def __str__(self) -> str:
        return self.text

    def within(self, level: int) -> str:
        """Its text as an operand of something that binds so tightly."""
        return self.text if self.level >= level else f"({self.text})"


def code(x: object) -> Code:
    """An expression as it is; anything else by its literal."""
    return x if isinstance(x, Code) else literal(x)


def literal(x: object) -> Code:
    """A Python value as its literal: numbers, strings, None and tuples of these."""
    if isinstance(x, (tuple, list)):
        return sequence([code(v) for v in x])
    if isinstance(x, str):
        return Code('"' + x.replace("\\", "\\\\").replace('"', '\\"') + '"')
    text = repr(x.item() if isinstance(x, np.generic) else x)
    if text in ("nan", "inf", "-inf"):
        text = text.replace("nan", "jnp.nan").replace("inf", "jnp.inf")
    if isinstance(x, float | np.floating):
        text = text.replace("e+", "e")  # as formatters have it
    return Code(text, UNARY if text.startswith("-") else ATOM)


def _after(before: str, x: Code) -> Code:
    """An expression behind a keyword, a key or an operator."""
    return replace(x, text=before + x.text, level=TUPLE, head=before + x.head if x.items else "")


def call(function: str, *arguments: object, **named: object) -> Code:
    """A call. Arguments that are no expressions are written as literals."""
    items = [code(a) for a in arguments]
    for key, value in named.items():
        items.append(_after(f"{key}=", code(value)))
    return Code(f"{function}({', '.join(i.text for i in items)})", ATOM, f"{function}(", tuple(items), ")")


def method(x: Code, name: str, *arguments: object, **named: object) -> Code:
    """A call of an expression's method."""
    return call(f"{x.within(ATOM)}.{name}", *arguments, **named)


def sequence(items: Sequence[Code], brackets: str = "()") -> Code:
    """A tuple or a list."""
    comma = "," if len(items) == 1 and brackets == "()" else ""
    text = brackets[0] + ", ".join(i.text for i in items) + comma + brackets[1]
    return Code(text, ATOM, brackets[0], tuple(items), brackets[1], True)


def first_of(x: Code) -> Code:
    """The first of several values."""
    if x.collection:
        return x.items[0]
    return Code(f"{x.within(ATOM)}[0]", ATOM, x.head, x.items, f"{x.close}[0]" if x.items else "")


def mapping(pairs: Iterable[tuple[str, Code]]) -> Code:
    """A dictionary, from the text of keys."""
    items = [_after(f"{k}: ", c) for k, c in pairs]
    return Code("{" + ", ".join(i.text for i in items) + "}", ATOM, "{", tuple(items), "}", True)


def infix(left: Code, operator: str, right: Code, level: int) -> Code:
    """Two operands and an operator between them; of equal levels the left is first."""
    above = level + 1 if level == COMPARE else level  # comparisons would chain
    last = right if right.level > level else Code(right.within(level + 1))
    return replace(_after(f"{left.within(above)} {operator} ", last), level=level)


def prefix(operator: str, x: Code) -> Code:
    """A sign, or a `not`, before an operand."""
    return Code(operator + x.within(UNARY), UNARY)


def lines(x: Code, indent: int, before: str = "", after: str = "") -> list[str]:
    """A statement in lines: as one if it fits; else broken inside of its outermost brackets, and of theirs."""
    whole = " " * indent + before + x.text + after
    if len(whole) <= WIDTH or not x.items:
        return [whole]
    inner = ", ".join(i.text for i in x.items)
    if not x.collection and indent + 4 + len(inner) <= WIDTH:
        broken = [" " * (indent + 4) + inner]
    elif not x.collection and len(x.items) == 1:
        broken = lines(x.items[0], indent + 4)
    else:
        broken = [line for item in x.items for line in lines(item, indent + 4, after=",")]
    return [" " * indent + before + x.head, *broken, " " * indent + x.close + after]


def assign(names: Sequence[str], x: Code, indent: int) -> list[str]:
    """An assignment to one name, or of a tuple to several."""
    targets = names[0] if len(names) == 1 else ", ".join(names)
    if len(targets) <= WIDTH // 2 or len(names) == 1:
        return lines(x, indent, f"{targets} = ")
    first = lines(x, indent, "results = ")
    return [*first, *(f"{' ' * indent}{name} = results[{k}]" for k, name in enumerate(names) if name != "_")]


def unpacked(names: Sequence[str], whole: str, indent: int) -> list[str]:
    """An assignment of a tuple's items to names."""
    flat = " " * indent + (f"({names[0]},)" if len(names) == 1 else ", ".join(names)) + f" = {whole}"
    return [flat] if len(flat) <= WIDTH else lines(sequence([Code(n) for n in names]), indent, after=f" = {whole}")


def returned(results: Sequence[Code], indent: int) -> list[str]:
    """A return of one value, or of a tuple."""
    if len(results) == 1:
        return lines(results[0], indent, "return ")
    flat = " " * indent + "return " + ", ".join(r.text for r in results)
    return [flat] if results and len(flat) <= WIDTH else lines(sequence(results), indent, "return ")


def definition(name: str, parameters: Sequence[str], indent: int = 0) -> list[str]:
    """The first line of a function, in several if it is long."""
    return lines(call(name, *(Code(p) for p in parameters)), indent, "def ", ":")


IMPORTED = ("jax", "jnp", "lax", "primitives", "np", "re", "partial", "Path", "P", "mesh", "fn", "w", "results", "checkpoint_name")


class Names:
    """Names of one scope, each given once. No function's own names are those of the module around it, and the other way round."""

    def __init__(self, taken: Iterable[str] = (), outside: Names | None = None) -> None:
        self.taken = {*taken, *IMPORTED, *keyword.kwlist, *dir(builtins)}
        self.outside = outside
        self.inside: set[str] = set()

    def within(self) -> Names:
        """The names of a function."""
        return Names(outside=self)

    def copy(self) -> Names:
        """The names of a function inside of a function."""
        return Names(self.taken, self.outside)

    def new(self, wanted: str) -> str:
        """A name like the wanted one that is not taken."""
        base = re.sub(r"\W+", "_", wanted).strip("_") or "x"
        base = f"x{base}" if base[0].isdigit() else base
        name, k = base, 2
        while self.has(name):
            name, k = f"{base}_{k}", k + 1
        self.taken.add(name)
        if self.outside is not None:
            self.outside.inside.add(name)
        return name

    def has(self, name: str) -> bool:
        """Whether a name is taken here, outside or inside."""
        return name in self.taken or name in self.inside or (self.outside is not None and name in self.outside.taken)
