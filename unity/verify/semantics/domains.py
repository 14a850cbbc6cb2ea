"""Domains of elements over which programs are interpreted: residues modulo a prime, plain numbers, and (in `symbolic`) polynomials.

Arrays of elements are numpy arrays of the domain's dtype. An equation that holds in a domain for random elements, or for symbols,
follows from the laws of a ring: a domain knows nothing of a sine but that equal arguments have equal sines. Integer and boolean
tensors are not made of elements; they are concrete (`primitives.core.StackedValue`).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import reduce

import numpy as np

Array = np.ndarray


class NotInterpreted(Exception):
    """A primitive, a function, or a use of one, has no meaning in this interpreter. The message names it, and the user's line."""


class ElementDomain(ABC):
    """A commutative ring with division, an order, and uninterpreted functions."""

    dtype: np.dtype
    decides: bool  # whether comparisons of elements give truth values, rather than elements

    @abstractmethod
    def constant(self, values: Array) -> Array:
        """Return floating, integer or boolean numbers as elements, exactly, in the same shape."""

    @abstractmethod
    def add(self, x: Array, y: Array) -> Array: ...

    @abstractmethod
    def mul(self, x: Array, y: Array) -> Array: ...

    @abstractmethod
    def neg(self, x: Array) -> Array: ...

    def sub(self, x: Array, y: Array) -> Array:
        return self.add(x, self.neg(y))

    @abstractmethod
    def div(self, x: Array, y: Array) -> Array: ...

    @abstractmethod
    def maximum(self, x: Array, y: Array) -> Array:
        """Return the larger of two elements. Associative, commutative, idempotent, between -inf and inf."""

    def minimum(self, x: Array, y: Array) -> Array:
        return self.neg(self.maximum(self.neg(x), self.neg(y)))

    @abstractmethod
    def function(self, name: str, *arrays: Array) -> Array:
        """Apply an uninterpreted function, identified by its name, elementwise to arrays that broadcast."""

    @abstractmethod
    def additive(self, name: str, x: Array) -> Array:
        """Apply an additive function, identified by its name: `f(x + y) = f(x) + f(y)`, and `f(-x) = -f(x)`."""

    @abstractmethod
    def compare(self, name: str, x: Array, y: Array) -> Array:
        """Compare by `lt`, `le`, `gt`, `ge`, `eq` or `ne`: to truth values where the domain decides, else to elements 0 and 1."""

    @abstractmethod
    def total(self, x: Array, axis: int) -> Array:
        """Sum along an axis."""

    def replaceable(self, x: Array) -> Array:
        """Return elements whose product with zero is zero, NaN included, so that a product with 0 or 1 can select them."""
        return x

    def dot(self, x: Array, y: Array) -> Array:
        """Multiply matrices, `[..., m, k] · [..., k, n] → [..., m, n]`. Leading dimensions broadcast."""
        shape = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        if not x.shape[-1]:
            return np.broadcast_to(self.constant(np.zeros(())), (*shape, x.shape[-2], y.shape[-1]))
        return self.total(self.mul(x[..., :, None, :], np.swapaxes(y, -1, -2)[..., None, :, :]), -1)

    def fold(self, operation: Callable[[Array, Array], Array], x: Array, axis: int) -> Array:
        """Fold at least one element along an axis by an associative and commutative operation."""
        x = np.moveaxis(x, axis, 0)
        while len(x) > 1:
            half = len(x) // 2
            x = np.concatenate([operation(x[:half], x[half : 2 * half]), x[2 * half :]])
        return x[0]


def digest(*words: object) -> int:
    """Return a hash of the words that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=16).digest(), "big")


class Modular(ElementDomain):
    """Residues modulo a Mersenne prime, in int64: exact fingerprints of many candidates at once.

    Two polynomials (or rational functions) of degree d that differ agree at random elements with probability d / p.
    """

    dtype = np.dtype(np.int64)
    decides = True

    def __init__(self, p: int = 2**31 - 1) -> None:
        if p & (p + 1) or p >= 2**32:
            raise ValueError(f"{p} is not a Mersenne prime of at most 31 bits")
        self.p, self.bits = p, p.bit_length()
        self.coefficients: dict[str, list[int]] = {}

    def _fold(self, x: Array) -> Array:
        """Reduce values below 2^(2 · bits) to congruent ones below 2^(bits + 1)."""
        return (x & self.p) + (x >> self.bits)

    def _less(self, x: Array) -> Array:
        """Reduce values from 0 to 2p to congruent ones of at most p.

        As an unsigned number, a negative difference is the larger one.
        """
        x = np.asarray(x)
        return np.minimum(x.view(np.uint64), (x - self.p).view(np.uint64)).view(np.int64)

    def _reduce(self, x: Array) -> Array:
        return self._less(self._fold(x))

    def constant(self, values: Array) -> Array:
        values = np.asarray(values)
        if values.dtype.kind in "biu":
            return (values.astype(np.int64) if values.dtype.itemsize < 8 else np.asarray(values % self.p).astype(np.int64)) % self.p
        if values.dtype.kind == "c":
            return self.add(
                self.constant(np.real(values)), self.mul(self.constant(np.imag(values)), self.function("imaginary unit"))
            )
        wide = values.astype(np.float64)
        whole = np.isfinite(wide) & (wide == np.floor(wide)) & (np.abs(wide) < 2**53)
        result = np.where(whole, wide, 0).astype(np.int64) % self.p
        for value in np.unique(wide[~whole]):
            result = np.where((wide == value) | (np.isnan(wide) & np.isnan(value)), self._number(float(value)), result)
        return result

    def _number(self, value: float) -> int:
        half = self.p // 2
        if value != value:
            return digest("nan") % self.p
        if abs(value) == np.inf:
            return half if value > 0 else half + 1
        exact = Fraction(value)
        return exact.numerator % self.p * pow(exact.denominator, -1, self.p) % self.p

    def add(self, x: Array, y: Array) -> Array:
        return self._less(x + y)

    def sub(self, x: Array, y: Array) -> Array:
        return self._less(x - y + self.p)

    def neg(self, x: Array) -> Array:
        return self._less(self.p - x)

    def mul(self, x: Array, y: Array) -> Array:
        return self._reduce(x * y)

    def div(self, x: Array, y: Array) -> Array:
        """Divide, by Fermat's little theorem. `x / 0 = 0`."""
        if y.size == 1:
            return self.mul(x, np.full_like(y, pow(int(y.item()), self.p - 2, self.p)))
        power, inverse, exponent = y, np.ones_like(y), self.p - 2
        while exponent:
            if exponent & 1:
                inverse = self.mul(inverse, power)
            power, exponent = self.mul(power, power), exponent >> 1
        return self.mul(x, inverse)

    def _rank(self, x: Array) -> Array:
        """Return ranks from 0 to p - 1, in the order of representatives between -p/2 and p/2."""
        return self._less(x + self.p // 2)

    def _of_rank(self, rank: Array) -> Array:
        """Return the residues of some ranks."""
        return self._less(rank + (self.p - self.p // 2))

    def maximum(self, x: Array, y: Array) -> Array:
        """Return the larger representative between -p/2 and p/2, so that relu means what it does for small numbers."""
        return self._of_rank(np.maximum(self._rank(x), self._rank(y)))

    def minimum(self, x: Array, y: Array) -> Array:
        return self._of_rank(np.minimum(self._rank(x), self._rank(y)))

    def compare(self, name: str, x: Array, y: Array) -> Array:
        compare = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
        if name in compare:
            return compare[name](self._rank(x), self._rank(y))
        return np.equal(x, y) if name == "eq" else np.not_equal(x, y)

    def _coefficients(self, name: str, count: int) -> list[int]:
        """Return nonzero coefficients for the polynomial that represents a function."""
        coefficients = self.coefficients.get(name, [])
        if len(coefficients) < count:
            coefficients = [1 + digest(name, k) % (self.p - 1) for k in range(count)]
            self.coefficients[name] = coefficients
        return coefficients

    def function(self, name: str, *arrays: Array) -> Array:
        """Evaluate a random polynomial of degree 5 in the first argument; each further argument is mixed in by another one."""
        coefficients = [np.int64(c) for c in self._coefficients(name, 9 * max(1, len(arrays)))]
        if not arrays:
            return np.asarray(coefficients[0])
        result = self._polynomial(coefficients[:6], arrays[0])
        for k, y in enumerate(arrays[1:], 1):
            c = coefficients[9 * k : 9 * k + 9]
            mixed = self._reduce(self._fold(result * c[6]) + self._fold(y * c[7]) + self._fold(self.mul(result, y) * c[8]))
            result = self._polynomial(c[:6], mixed)
        return result

    def _polynomial(self, coefficients: list[np.int64], x: Array) -> Array:
        result = np.asarray(coefficients[0])
        for c in coefficients[1:]:
            result = self._reduce(result * x + c)
        return result

    def additive(self, name: str, x: Array) -> Array:
        """Return a fixed random multiple, which is additive (and linear besides)."""
        return self.mul(x, np.asarray(self._coefficients(name, 1)[0]))

    def total(self, x: Array, axis: int) -> Array:
        return self._reduce(x.sum(axis=axis, dtype=np.int64))

    def dot(self, x: Array, y: Array) -> Array:
        """Multiply matrices by two products in int64, with the upper and the lower 16 bits of y, so that nothing overflows."""
        parts = []
        for k in range(0, x.shape[-1], 2**14):
            left, right = x[..., k : k + 2**14], y[..., k : k + 2**14, :]
            upper = self._reduce(np.matmul(left, right >> 16))
            parts.append(self._reduce((upper << 16) + np.matmul(left, right & 0xFFFF)))
        return reduce(self.add, parts) if parts else super().dot(x, y)


class Plain(ElementDomain):
    """Numpy's numbers: for concrete integers and truth values beside every domain, and for counterexamples that people read."""

    dtype = np.dtype(np.float64)
    decides = True

    def constant(self, values: Array) -> Array:
        return np.asarray(values).astype(np.complex128 if np.asarray(values).dtype.kind == "c" else np.float64)

    def add(self, x: Array, y: Array) -> Array:
        return np.add(x, y)

    def sub(self, x: Array, y: Array) -> Array:
        return np.subtract(x, y)

    def mul(self, x: Array, y: Array) -> Array:
        return np.multiply(x, y)

    def neg(self, x: Array) -> Array:
        return np.negative(x)

    def div(self, x: Array, y: Array) -> Array:
        """Divide, integers towards zero."""
        if np.asarray(x).dtype.kind not in "iu":
            return np.divide(x, y)
        quotient = np.floor_divide(np.abs(x), np.abs(y))
        return np.where((x < 0) != (y < 0), -quotient, quotient).astype(x.dtype)

    def maximum(self, x: Array, y: Array) -> Array:
        return np.maximum(x, y)

    def minimum(self, x: Array, y: Array) -> Array:
        return np.minimum(x, y)

    def compare(self, name: str, x: Array, y: Array) -> Array:
        compare = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
        return {**compare, "eq": np.equal, "ne": np.not_equal}[name](x, y)

    def function(self, name: str, *arrays: Array) -> Array:
        if name not in NUMPY_FUNCTIONS:
            raise NotInterpreted(f"{name}: no function of plain numbers has this name")
        return np.asarray(NUMPY_FUNCTIONS[name](*arrays))

    def additive(self, name: str, x: Array) -> Array:
        return self.function(name, x)

    def total(self, x: Array, axis: int) -> Array:
        return np.sum(x, axis=axis, dtype=x.dtype)

    def dot(self, x: Array, y: Array) -> Array:
        return np.matmul(x, y)


UFUNCS = "abs cbrt ceil cos cosh exp exp2 expm1 floor log log1p log2 sign sin sinh sqrt tan tanh real imag conj"
NUMPY_FUNCTIONS: Mapping[str, Callable[..., Array]] = {
    **{name: getattr(np, name) for name in UFUNCS.split()},
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "pow": np.power,
    "atan2": np.arctan2,
    "rem": np.fmod,
    "imaginary unit": lambda: np.asarray(1j),
}
