"""The CUDA C++ of chains that end with reductions of rows: several threads share a row, and add up its elements.

A softmax goes over its row three times: for the largest element, for the sum of the weights, and for the results. What
the chain computes before it is computed each time, rather than stored.

The order in which elements are added up depends on the length of a row alone, and not on the number of rows: a row has
the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from asyncflow.compiler.program.kernels.chains import Chain
from asyncflow.graph.values.dtypes import summed_in
from asyncflow.ops.cuda.source import HALVES, UfuncLoop, arithmetic, convert, extreme
from asyncflow.ops.layers.nn import LOG_SOFTMAX
from asyncflow.ops.reductions.statistical import MAX, MEAN, MIN

THREADS: Final = 128
"""Number of threads of a block, as CuPy's kernels of elements have."""

_MOST_LANES: Final = 256

LONGEST_ROW: Final = 1 << 14
"""Length beyond which several blocks should share a row, as CuPy's kernels do."""


def lanes_of(length: int) -> int:
    """Return the number of threads that share a row of this length: a power of 2, so that none is without elements."""
    return 1 << min(length, _MOST_LANES).bit_length() - 1


def block_of(lanes: int) -> int:
    """Return the number of threads of a block."""
    return max(THREADS, lanes)


class _Reduction(NamedTuple):
    """The text of one reduction: the type that it is computed in, the element, and the result of a row."""

    chain: Chain
    place: int
    element: str

    @property
    def loop(self) -> UfuncLoop:
        stored = self.chain.reduced[self.place]
        member, dtype = self.chain.member(self.chain.outputs[stored.output]), self.chain.specs[stored.value].dtype
        return UfuncLoop(dtype if member.op in (MAX, MIN) else summed_in(member.spec.dtype))

    @property
    def scales(self) -> bool:
        """True for a softmax or its logarithm: the reduction is that to the largest element."""
        return self.chain.member(self.chain.outputs[self.chain.reduced[self.place].output]).scales

    def converted(self) -> str:
        """The element, in the type of the reduction."""
        return convert(self.element, self.chain.specs[self.chain.reduced[self.place].value].dtype, self.loop.dtype)

    def combined(self, a: str, b: str) -> str:
        """Two elements, or results of several elements, as one."""
        op = self.chain.member(self.chain.outputs[self.chain.reduced[self.place].output]).op
        if op in (MAX, MIN) or self.scales:
            return str(extreme("minimum" if op is MIN else "maximum")(self.loop, a, b))
        return str(arithmetic("+", "|")(self.loop, a, b))

    def result(self, total: str) -> str:
        """The output, as it is stored."""
        member = self.chain.member(self.chain.outputs[self.chain.reduced[self.place].output])
        if member.op is MEAN:
            total = f"{total} / static_cast<{self.loop.type}>(length)"
        return self._stored(total)

    def weight(self) -> str:
        """The weight of an element of a softmax."""
        return f"exp{self.loop.suffix}(e{self.place} - m{self.place})"

    def scaled(self) -> str:
        """An element of the output, where the sum of the weights is known."""
        member, place = self.chain.member(self.chain.outputs[self.chain.reduced[self.place].output]), self.place
        if member.op is LOG_SOFTMAX:
            return self._stored(f"e{place} - m{place} - log{self.loop.suffix}(d{place})")
        return self._stored(f"{self.weight()} / d{place}")

    def _stored(self, text: str) -> str:
        name = self.chain.member(self.chain.outputs[self.chain.reduced[self.place].output]).spec.dtype.name
        return f"static_cast<{name}>({text})" if name in HALVES else text


def rows_text(chain: Chain, elements: Sequence[str], operations: tuple[str, str], index: str, lanes: int) -> str:
    """Return the body of a kernel that computes and reduces rows.

    Args:
        chain: of the kernel.
        elements: the variables of the values to be reduced.
        operations: compute the values for element number ``i``: first with all stores, then without.
        index: the type of numbers of elements.
        lanes: number of threads that share a row.
    """
    return "\n".join(_rows(chain, elements, operations, index, lanes))


def _rows(chain: Chain, elements: Sequence[str], operations: tuple[str, str], index: str, lanes: int) -> Iterator[str]:
    found = [_Reduction(chain, place, element) for place, element in enumerate(elements)]
    block = block_of(lanes)
    n_rows = block // lanes
    for place, each in enumerate(found):
        yield f"__shared__ {each.loop.type} s{place}[{block}];"
    yield f"const int lane = threadIdx.x % {lanes}, place = threadIdx.x / {lanes};"
    start, step = f"({index})blockIdx.x * {n_rows}", f"({index})gridDim.x * {n_rows}"
    yield f"for ({index} first = {start}; first < rows; first += {step}) {{"
    yield f"const {index} row = first + place;"
    for place, each in enumerate(found):
        yield f"{each.loop.type} a{place} = 0;"
    yield from _each_element(found, operations[0], index, lanes)
    for place, each in enumerate(found):
        yield f"a{place} = k == lane ? e{place} : {each.combined(f'a{place}', f'e{place}')};"
    yield "}"
    for place in range(len(found)):
        yield f"s{place}[threadIdx.x] = a{place};"
    yield from _together(lanes, {each.place: each.combined for each in found})
    yield "if (lane == 0 && row < rows) {"
    for place, each in enumerate(found):
        if not each.scales:
            yield f"z{place}[row] = {each.result(f's{place}[threadIdx.x]')};"
    yield "}"
    scaled = [each for each in found if each.scales]
    if scaled:
        yield from _scaled_rows(scaled, operations[1], index, lanes)
    yield "__syncthreads();\n}"


def _each_element(found: Sequence[_Reduction], operation: str, index: str, lanes: int) -> Iterator[str]:
    """Begin a loop over the elements of a row, ``e0`` and so on."""
    yield f"if (row < rows) for ({index} k = lane; k < length; k += {lanes}) {{"
    yield f"const {index} i = row * length + k;"
    yield operation
    for each in found:
        yield f"const {each.loop.type} e{each.place} = {each.converted()};"


def _together(lanes: int, combined: Mapping[int, Callable[[str, str], str]]) -> Iterator[str]:
    """Combine the results of all threads of a row, in the memory that they share."""
    yield f"for (int half = {lanes // 2}; half; half /= 2) {{\n__syncthreads();\nif (lane < half) {{"
    for place, combine in combined.items():
        own, other = f"s{place}[threadIdx.x]", f"s{place}[threadIdx.x + half]"
        yield f"{own} = {combine(own, other)};"
    yield "}\n}"


def _scaled_rows(found: Sequence[_Reduction], operation: str, index: str, lanes: int) -> Iterator[str]:
    """Go over a row twice more, whose largest element is known."""
    for name, start in (("m", "t"), ("d", "")):
        yield "__syncthreads();"
        for each in found:
            yield f"const {each.loop.type} {name}{each.place} = s{each.place}[threadIdx.x - lane];"
        yield "__syncthreads();"
        if not start:
            continue
        for each in found:
            yield f"{each.loop.type} t{each.place} = 0;"
        yield from _each_element(found, operation, index, lanes)
        for each in found:
            yield f"t{each.place} += {each.weight()};"
        yield "}"
        for each in found:
            yield f"s{each.place}[threadIdx.x] = t{each.place};"
        yield from _together(lanes, {each.place: "{} + {}".format for each in found})
    yield from _each_element(found, operation, index, lanes)
    for each in found:
        yield f"z{each.place}[i] = {each.scaled()};"
    yield "}"
