"""Python expressions and statements as values: with precedences, and broken into lines as formatters break them."""

from __future__ import annotations

import builtins
import json
import keyword
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

WIDTH = 120
ATOM, POWER, UNARY, TIMES, PLUS, SHIFT, AND, XOR, OR, COMPARE, NOT, TUPLE = range(100, -20, -10)


@dataclass(frozen=True)
class Code:
    """An expression: its text on one line, its precedence, and the items of a trailing call or collection, where it may be broken.

    Attributes:
        text: the expression on one line.
        level: its precedence.
        head: the text up to the items.
        items: the items of the call or collection that the expression ends in.
        close: the text after the items.
        collection: whether it is a tuple, a list or a dictionary.
    """

    text: str
    level: int = ATOM
    head: str = ""
    items: tuple[Code, ...] = ()
    close: str = ""
    collection: bool = False

    def __str__(self) -> str:
        return self.text

    def within(self, level: int) -> str:
        """Return the text as an operand of an operator of some precedence, in parentheses if it binds less tightly."""
        return self.text if self.level >= level else f"({self.text})"


def code(x: object) -> Code:
    """Return an expression as it is, and any other value as its literal."""
    return x if isinstance(x, Code) else literal(x)


def literal(x: object) -> Code:
    """Return the literal of a number, a string, None, or a tuple of these."""
    if isinstance(x, (tuple, list)):
        return sequence([code(v) for v in x])
    if isinstance(x, str):
        return Code(_string(x))
    text = repr(x.item() if isinstance(x, np.generic) else x)
    if text in ("nan", "inf", "-inf"):
        text = text.replace("nan", "jnp.nan").replace("inf", "jnp.inf")
    if isinstance(x, float | np.floating):
        text = text.replace("e+", "e")  # as formatters write it
    return Code(text, UNARY if text.startswith("-") else ATOM)


def _string(x: str) -> str:
    """Return the literal of a string, in the quotes that formatters choose."""
    text = json.dumps(x, ensure_ascii=False)
    return "'" + text[1:-1].replace('\\"', '"') + "'" if '"' in x and "'" not in x else text


def _after(before: str, x: Code) -> Code:
    """Return an expression with a keyword, a key or an operator before it."""
    return replace(x, text=before + x.text, level=TUPLE, head=before + x.head if x.items else "")


def call(function: str, *arguments: object, **named: object) -> Code:
    """Return a call. Arguments that are not expressions are written as literals."""
    items = [code(a) for a in arguments]
    for key, value in named.items():
        items.append(_after(f"{key}=", code(value)))
    return Code(f"{function}({', '.join(i.text for i in items)})", ATOM, f"{function}(", tuple(items), ")")


def method(x: Code, name: str, *arguments: object, **named: object) -> Code:
    """Return a call of a method of an expression."""
    return call(f"{x.within(ATOM)}.{name}", *arguments, **named)


def sequence(items: Sequence[Code], brackets: str = "()") -> Code:
    """Return a tuple or a list."""
    comma = "," if len(items) == 1 and brackets == "()" else ""
    text = brackets[0] + ", ".join(i.text for i in items) + comma + brackets[1]
    return Code(text, ATOM, brackets[0], tuple(items), brackets[1], True)


def first_of(x: Code) -> Code:
    """Return the first item of an expression that has several values."""
    if x.collection:
        return x.items[0]
    return Code(f"{x.within(ATOM)}[0]", ATOM, x.head, x.items, f"{x.close}[0]" if x.items else "")


def mapping(pairs: Iterable[tuple[str, Code]]) -> Code:
    """Return a dictionary, given the source of its keys."""
    items = [_after(f"{k}: ", c) for k, c in pairs]
    return Code("{" + ", ".join(i.text for i in items) + "}", ATOM, "{", tuple(items), "}", True)


def infix(left: Code, operator: str, right: Code, level: int) -> Code:
    """Return an operator between two operands, left-associative."""
    above = level + 1 if level == COMPARE else level  # else comparisons would chain
    last = right if right.level > level else Code(right.within(level + 1))
    return replace(_after(f"{left.within(above)} {operator} ", last), level=level)


def prefix(operator: str, x: Code) -> Code:
    """Return a sign or `~` before an operand."""
    return Code(operator + x.within(UNARY), UNARY)


def lines(x: Code, indent: int, before: str = "", after: str = "") -> list[str]:
    """Return a statement as one line if it fits, else broken inside its outermost brackets, and recursively inside theirs."""
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
    """Return an assignment to one name, or of a tuple to several."""
    targets = names[0] if len(names) == 1 else ", ".join(names)
    if len(targets) <= WIDTH // 2 or len(names) == 1:
        return lines(x, indent, f"{targets} = ")
    first = lines(x, indent, "results = ")
    return [*first, *(f"{' ' * indent}{name} = results[{k}]" for k, name in enumerate(names) if name != "_")]


def unpacked(names: Sequence[str], value: str, indent: int) -> list[str]:
    """Return an assignment of a tuple's items to names."""
    flat = " " * indent + (f"({names[0]},)" if len(names) == 1 else ", ".join(names)) + f" = {value}"
    return [flat] if len(flat) <= WIDTH else lines(sequence([Code(n) for n in names]), indent, after=f" = {value}")


def returned(results: Sequence[Code], indent: int) -> list[str]:
    """Return a return statement of one value or of a tuple."""
    if len(results) == 1:
        return lines(results[0], indent, "return ")
    flat = " " * indent + "return " + ", ".join(r.text for r in results)
    return [flat] if results and len(flat) <= WIDTH else lines(sequence(results), indent, "return ")


def definition(name: str, parameters: Sequence[str], indent: int = 0) -> list[str]:
    """Return the first line of a function, broken into several if it is long."""
    return lines(call(name, *(Code(p) for p in parameters)), indent, "def ", ":")


RESERVED = ("jax", "jnp", "lax", "primitives", "np", "re", "partial", "Path", "P", "mesh", "fn", "w", "results", "checkpoint_name")


class Scope:
    """The names of one scope. No name of a function equals a name of the module around it."""

    def __init__(self, taken: Iterable[str] = (), outside: Scope | None = None) -> None:
        self.taken = {*taken, *RESERVED, *keyword.kwlist, *dir(builtins)}
        self.outside = outside
        self.inside: set[str] = set()

    def within(self) -> Scope:
        """Return the scope of a function in this scope."""
        return Scope(outside=self)

    def copy(self) -> Scope:
        """Return the scope of a function nested in this function, which may reuse the names that are defined later."""
        return Scope(self.taken, self.outside)

    def new(self, preferred: str) -> str:
        """Return a free name like the preferred one, and reserve it."""
        base = re.sub(r"\W+", "_", preferred).strip("_") or "x"
        base = f"x{base}" if base[0].isdigit() else base
        name, k = base, 2
        while self.has(name):
            name, k = f"{base}_{k}", k + 1
        self.taken.add(name)
        if self.outside is not None:
            self.outside.inside.add(name)
        return name

    def has(self, name: str) -> bool:
        """Return whether a name is used here, in the module, or in a function of the module."""
        return name in self.taken or name in self.inside or (self.outside is not None and name in self.outside.taken)


LETTERS = ("x", "y", "z", "u", "v")


def letters(count: int) -> list[str]:
    """Return short parameter names for values without names."""
    return [LETTERS[k % len(LETTERS)] for k in range(count)]


def stem(x: Code) -> str:
    """Return the last name in an expression, without a number at its end, as the base of a new name."""
    names = re.findall(r"[A-Za-z_]\w*", x.text)
    return re.sub(r"(_\d+)+$", "", names[-1]) if names else "x"


def packed(items: Sequence[Code]) -> Code:
    """Return several values as one expression: None for no value, the value itself for one, else a tuple."""
    return items[0] if len(items) == 1 else sequence(items) if items else Code("None")


def packed_targets(names: Sequence[str]) -> str:
    """Return the assignment target for values that `packed` packs."""
    return names[0] if len(names) == 1 else f"({', '.join(names)})" if names else "_"
