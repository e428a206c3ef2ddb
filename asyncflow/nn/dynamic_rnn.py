"""`dynamic_rnn`: a cell over sequences of different lengths, as one `while_loop`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncflow.control.body import require_kept, result_tensor, user_function
from asyncflow.control.primitives.enter import check_parallel_iterations
from asyncflow.control.stores.array_store import ArrayKind
from asyncflow.control.stores.tensor_array import ARRAY, TensorArray
from asyncflow.control.while_loop import add_loop
from asyncflow.errors import GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, as_tensor, graph_for
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import int64
from asyncflow.graph.values.shapes import Shape, is_static
from asyncflow.graph.values.spec import Spec
from asyncflow.nn.packing import Packing, first_rows, packing, place_rows, reshaped
from asyncflow.ops.arithmetic.elementwise import add
from asyncflow.ops.arithmetic.logic import less
from asyncflow.ops.arrays.manipulation import concat
from asyncflow.ops.arrays.shape import extent_of
from asyncflow.ops.indexing.indexing import gather, getitem
from asyncflow.values import Nest

_COUNTER = Spec(int64, ())


def dynamic_rnn(
    cell: Callable[[Nest, Nest], tuple[Nest, Nest]],
    inputs: Nest,
    initial_state: Nest,
    lengths: TensorLike | None = None,
    *,
    parallel_iterations: int = 32,
    swap_memory: bool = False,
    name: str | None = None,
) -> tuple[Nest, Nest]:
    """Run ``output, state = cell(x, state)`` over the time steps of a batch, and only up to each sequence's end.

    With `lengths`, step t computes the rows of those sequences that have one, and there are as many steps as the
    longest sequence has: nothing is computed past an end. In whatever order the sequences stand, they are sorted once,
    before the loop, so that unfinished sequences are the first rows of the cell's input.

    Args:
        cell: called once, while the graph is built, with the inputs of one step, ``(rows, ...)``, and the state of the
            same rows; returns its output, any nest of ``(rows, ...)``, and the next state. `rows` is the batch without
            `lengths`; with them it is known in the run only. Rows do not depend on one another.
        inputs: ``(steps, batch, ...)``, or a nest of such with the first two extents in common.
        initial_state: ``(batch, ...)``, or a nest of such. The state keeps its nest, dtypes and shapes.
        lengths: integers, ``(batch,)``, from 0 to `steps`; None if all sequences have all steps.
        parallel_iterations: how many steps may be worked on at once, as far as states allow.
        swap_memory: as for `while_loop`.
        name: of the loop.

    Returns:
        The outputs, each ``(steps, batch, ...)``, with zeros past a sequence's end; and the state after each
        sequence's last step, which for one without steps is its initial state.

    Raises:
        GraphError, DTypeError, ShapeError: the cell does not return an output and a state like the one it is given, or
            extents do not fit together.
        AssertionError: (in the run, as the cause of a KernelError) a length out of range, or lengths that are not one
            for each sequence.

    >>> import asyncflow as af
    >>> weights = af.nn.lstm_weights(3, 5)
    >>> with af.Graph():
    ...     read = weights.read()
    ...     zeros = af.zeros((2, 5), dtype="float32")
    ...     xs = af.ones((7, 2, 3), dtype="float32")
    ...     outputs, (h, c) = dynamic_rnn(lambda x, s: af.nn.lstm_cell(x, s, read), xs, (zeros, zeros), [7, 4])
    >>> print(outputs.dtype, outputs.shape, h.shape)
    float32 (7, 2, 5) (2, 5)
    """
    check_parallel_iterations(parallel_iterations)
    with graph_for(*nest.flatten((inputs, initial_state, lengths))[0]) as graph:
        sequences = _Sequences(inputs, initial_state)
        arguments = (
            f"the inputs of one step, {nest.describe(sequences.structure)}, and the state, "
            f"{nest.describe(sequences.state_structure)}"
        )
        cell = user_function(cell, "cell of dynamic_rnn", 2, arguments)
        packed = None if lengths is None else packing(lengths, sequences.steps, sequences.batch)
        loop = _RnnLoop(graph, graph.unique_name("rnn" if name is None else name), sequences, packed)
        structure = loop.trace(cell)
        outputs, state = loop.build(parallel_iterations, swap_memory)
        return structure.unflatten(outputs), sequences.state_structure.unflatten(state)


class _Sequences:
    """Inputs and initial state, with the known extents of steps and batch."""

    def __init__(self, inputs: Nest, initial_state: Nest) -> None:
        leaves, self.structure = nest.flatten(inputs)
        self.inputs = [as_tensor(leaf) for leaf in leaves]
        leaves, self.state_structure = nest.flatten(initial_state)
        self.state = [as_tensor(leaf) for leaf in leaves]
        if not self.inputs or not self.state:
            raise GraphError(
                f"dynamic_rnn: needs inputs and a state to begin with; got {inputs!r} and {initial_state!r}"
            )
        paths = [*self.structure.paths("inputs"), *self.state_structure.paths("initial_state")]
        self._check(dict(zip(paths, [*self.inputs, *self.state], strict=True)))
        self.steps = self._extent([(x, 0) for x in self.inputs])
        self.batch = self._extent([*((x, 1) for x in self.inputs), *((x, 0) for x in self.state)])

    def _check(self, tensors: dict[str, Tensor]) -> None:
        seen: dict[str, tuple[int, str]] = {}
        for path, tensor in tensors.items():
            axes = ("steps", "batch") if path.startswith("inputs") else ("batch",)
            if tensor.shape is None or len(tensor.shape) < len(axes):
                raise ShapeError(f"dynamic_rnn: {path} is [{','.join(axes)},...]; got {tensor!r}")
            for axis, extent in zip(axes, tensor.shape, strict=False):
                if extent is not None and seen.setdefault(axis, (extent, path))[0] != extent:
                    first, where = seen[axis]
                    raise ShapeError(f"dynamic_rnn: {where} has {axis} {first}, {path} has {extent}")

    @staticmethod
    def _extent(axes: Sequence[tuple[Tensor, int]]) -> int | Tensor:
        extents = [extent_of(x, axis) for x, axis in axes]
        return next((extent for extent in extents if isinstance(extent, int)), extents[0])


class _RnnLoop:
    """The loop of a `dynamic_rnn`, built body first: only the cell tells how many outputs there are.

    Loop variables are a counter, the state, and an array for each output. If sequences end early, an array for each
    part of the state is added. Step t writes the rows of sequences that ended before it there.
    """

    def __init__(self, graph: Graph, label: str, sequences: _Sequences, packed: Packing | None) -> None:
        self.label = label
        self.sequences = sequences
        self.packed = packed
        self.condition = Subgraph(graph, f"{label}/cond")
        self.body = Subgraph(graph, f"{label}/body")
        self.count = sequences.steps if packed is None else packed.longest
        self.specs = [Spec(x.dtype, self._rows(x.shape)) for x in sequences.state]
        self.outputs: list[ArrayKind] = []
        self.ended = [] if packed is None else [_kind(spec) for spec in self.specs]

    def _rows(self, shape: Shape) -> Shape:
        """Return the shape of a tensor with one row for each unfinished sequence."""
        assert shape is not None
        return shape if self.packed is None else (None, *shape[1:])

    def trace(self, cell: Callable[[Nest, Nest], tuple[Nest, Nest]]) -> nest.Structure:
        """Builds the body; gives the nest of the outputs."""
        arrays = [self._input(x) for x in self.sequences.inputs]
        body = self.body
        step = body.add_input(_COUNTER, "var")
        states = [body.add_input(spec, "var") for spec in self.specs]
        ended = [body.add_input(ARRAY, "var") for _ in self.ended]
        with body:
            xs = [array.read(step) for array in arrays]
            going = states
            if self.packed is not None:
                rows = extent_of(xs[0], 0)
                going = [first_rows(x, xs[0]) for x in states]
                gone = [getitem(x, slice(rows, None)) for x in states]
                ended_after = self._written(step, ended, self.ended, gone)
            else:
                ended_after = []
            returned = cell(self.sequences.structure.unflatten(xs), self.sequences.state_structure.unflatten(going))
            structure, values, after = self._returned(returned)
            self.outputs = [_kind(Spec(x.dtype, self._rows(x.shape))) for x in values]
            handles = [body.add_input(ARRAY, "var") for _ in values]
            written = self._written(step, handles, self.outputs, values)
            body.results = [add(step, 1), *after, *ended_after, *written]
        # Loop variables come before captures, although some were made after captures.
        body.inputs = [step, *states, *ended, *handles]
        return structure

    def _input(self, x: Tensor) -> TensorArray:
        # The rows are views of a tensor that stays alive, so freeing them one by one gains nothing.
        assert x.shape is not None
        row = Spec(x.dtype, self._rows(x.shape[1:]))
        array = TensorArray(row.dtype, self.count, element_shape=row.shape, clear_after_read=False)
        return array.unstack(x) if self.packed is None else array.split(self.packed.pack(x), self.packed.counts)

    @staticmethod
    def _written(
        step: Tensor, handles: Sequence[Tensor], kinds: Sequence[ArrayKind], values: Sequence[Tensor]
    ) -> list[Tensor]:
        return [
            TensorArray.from_handle(handle, kind).write(step, value).handle
            for handle, kind, value in zip(handles, kinds, values, strict=True)
        ]

    def _returned(self, returned: Nest) -> tuple[nest.Structure, list[Tensor], list[Tensor]]:
        """The results of the cell: the nest and the values of its outputs, and the state."""
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise GraphError(f"the cell of dynamic_rnn returns its output and the next state; got {returned!r}")
        leaves, structure = nest.flatten(returned[0])
        values = [result_tensor(self.body, leaf) for leaf in leaves]
        for path, value in zip(structure.paths("output"), values, strict=True):
            if value.shape is None or not value.shape:
                raise ShapeError(
                    f"{path} of the cell of dynamic_rnn has a row for each sequence, and a rank that is known; got "
                    f"{value!r}"
                )
        wanted = self.sequences.state_structure
        rule = f"the cell of dynamic_rnn returns a state like the one it is given, {nest.describe(wanted)}"
        found = nest.match(wanted, returned[1], rule)
        after = [result_tensor(self.body, leaf, x) for leaf, x in zip(found, self.sequences.state, strict=True)]
        for path, spec, x in zip(wanted.paths("state"), self.specs, after, strict=True):
            require_kept(f"{path} of dynamic_rnn", spec, "the cell", x)
        return structure, values, after

    def build(self, parallel_iterations: int, swap_memory: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Adds the loop; gives the outputs and the last state."""
        packed, state = self.packed, self.sequences.state
        if packed is not None:
            state = [gather(x, packed.descending) for x in state]
        arrays = [
            TensorArray(kind.dtype, self.count, element_shape=kind.element_shape)
            for kind in [*self.ended, *self.outputs]
        ]
        specs = (_COUNTER, *self.specs, *(ARRAY for _ in arrays))
        for spec in specs:
            self.condition.add_input(spec, "var")
        with self.condition:
            self.condition.results = [less(self.condition.inputs[0], self.count)]
        initial = [as_tensor(0, int64), *state, *(array.handle for array in arrays)]
        node = add_loop(self.condition, self.body, initial, specs, self.label, parallel_iterations, swap_memory)
        last, handles = node.outputs[1 : 1 + len(state)], node.outputs[1 + len(state) :]
        ended = handles[: len(self.ended)]
        outputs = [
            TensorArray.from_handle(handle, kind, length=self.count if isinstance(self.count, int) else None)
            for handle, kind in zip(handles[len(ended) :], self.outputs, strict=True)
        ]
        if packed is None:
            return [self._stacked(array) for array in outputs], list(last)
        finals = [
            concat([TensorArray.from_handle(handle, kind).concat(), x], axis=0)
            for handle, kind, x in zip(ended, self.ended, last, strict=True)
        ]
        # Sequences that end first come first, as in the ascending order.
        placed = [place_rows(x, packed.ascending, self.sequences.batch) for x in finals]
        return [packed.unpack(array.concat()) for array in outputs], placed

    def _stacked(self, array: TensorArray) -> Tensor:
        if is_static(array.element_shape):
            return array.stack()
        # A stack without steps would not know the number of sequences.
        steps, batch = self.sequences.steps, self.sequences.batch
        return reshaped(array.concat(), (steps, batch), 1)


def _kind(element: Spec) -> ArrayKind:
    return ArrayKind(element.dtype, element.shape, dynamic_size=False, clear_after_read=True)
