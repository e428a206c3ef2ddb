"""The CUDA C++ of chains that end with reductions of rows: several threads share a row, and add up its elements.

The order in which elements are added up depends on the length of a row alone, and not on the number of rows: a row has
the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from asyncflow.compiler.program.kernels.chains import Chain
from asyncflow.graph.values.dtypes import summed_in
from asyncflow.ops.cuda.source import HALVES, UfuncLoop, arithmetic, convert, extreme
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

    def converted(self) -> str:
        """The element, in the type of the reduction."""
        return convert(self.element, self.chain.specs[self.chain.reduced[self.place].value].dtype, self.loop.dtype)

    def combined(self, a: str, b: str) -> str:
        """Two elements, or results of several elements, as one."""
        op = self.chain.member(self.chain.outputs[self.chain.reduced[self.place].output]).op
        if op in (MAX, MIN):
            return str(extreme("maximum" if op is MAX else "minimum")(self.loop, a, b))
        return str(arithmetic("+", "|")(self.loop, a, b))

    def result(self, total: str) -> str:
        """The output, as it is stored."""
        member = self.chain.member(self.chain.outputs[self.chain.reduced[self.place].output])
        if member.op is MEAN:
            total = f"{total} / static_cast<{self.loop.type}>(length)"
        name = member.spec.dtype.name
        return f"static_cast<{name}>({total})" if name in HALVES else total


def rows_text(chain: Chain, elements: Sequence[str], operation: str, index: str, lanes: int) -> str:
    """Return the body of a kernel that computes and reduces rows.

    Args:
        chain: of the kernel.
        elements: the variables of the values to be reduced.
        operation: computes them, for element number ``i``.
        index: the type of numbers of elements.
        lanes: number of threads that share a row.
    """
    return "\n".join(_rows(chain, elements, operation, index, lanes))


def _rows(chain: Chain, elements: Sequence[str], operation: str, index: str, lanes: int) -> Iterator[str]:
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
    yield f"if (row < rows) for ({index} k = lane; k < length; k += {lanes}) {{"
    yield f"const {index} i = row * length + k;"
    yield operation
    for place, each in enumerate(found):
        yield f"const {each.loop.type} e{place} = {each.converted()};"
        yield f"a{place} = k == lane ? e{place} : {each.combined(f'a{place}', f'e{place}')};"
    yield "}"
    for place in range(len(found)):
        yield f"s{place}[threadIdx.x] = a{place};"
    yield f"for (int half = {lanes // 2}; half; half /= 2) {{\n__syncthreads();\nif (lane < half) {{"
    for place, each in enumerate(found):
        own, other = f"s{place}[threadIdx.x]", f"s{place}[threadIdx.x + half]"
        yield f"{own} = {each.combined(own, other)};"
    yield "}\n}\nif (lane == 0 && row < rows) {"
    for place, each in enumerate(found):
        yield f"z{place}[row] = {each.result(f's{place}[threadIdx.x]')};"
    yield "}\n__syncthreads();\n}"
