"""Half of a pass: sums of matrix products over iterations, which nothing in their loop reads, are computed later.

A loop variable that is only ever ``total = total + a @ g`` gives way to another variable. Several such sums with the
same `g` share it, and the body adds their operands to it. Behind the loop stand the sums themselves (`pending_sums`).
The sum of the rows of `g`, the gradient of a bias, joins them.

A loop around that loop may only hand the totals on. It then carries the shared variable in their place, so that blocks
end at the same iterations whether or not a gradient runs in segments: the sums are the same to the bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from asyncflow.compiler.batching.batch_rows import FAST
from asyncflow.compiler.batching.pending_sums import ADD_PRODUCTS, NEW_SUMS, SUMS, enough_rows, pays, rows_at_once
from asyncflow.compiler.program.detached import detached_node
from asyncflow.compiler.program.purity import awaited_nodes
from asyncflow.compiler.program.replacements import Replacements
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import WhileNode
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.shapes import is_compatible, is_static
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arithmetic.elementwise import ADD
from asyncflow.ops.derivatives.shapes import ENSURE_SHAPE, SUM_TO
from asyncflow.ops.matrices.products import MATMUL


def batch_sums(
    loop: WhileNode, block_bytes: int, replaced: Replacements, *, on_card: bool = False
) -> tuple[list[Node], list[Node]]:
    """Batches sums of `loop`, in place.

    Args:
        loop: a `while`.
        block_bytes: most bytes of a block of rows.
        replaced: gets the new tensors for the loop's results.
        on_card: a card may run it, whose kernels use its own memory alone: all nodes of a sum are on one device.

    Returns:
        Returns the nodes to stand in front of the loop, and behind it.
    """
    before: list[Node] = []
    after: list[Node] = []
    for group in _groups(_sums(loop)):
        if on_card and _block_of(group, block_bytes, on_card=True) == 0:
            continue  # a store would launch as many kernels, and no others could be fused with them
        new, made = _move(loop, group, block_bytes, on_card)
        before.append(new)
        after.append(made)
        replaced.tensors.update(zip((total.output for total in group), made.outputs, strict=True))
    for inner in [node for node in loop.body.nodes if isinstance(node, WhileNode)]:
        for at in [at for at, start in enumerate(inner.inputs[: inner.n_vars]) if start.node.op is NEW_SUMS]:
            moved = _carried(loop, inner, at)
            if moved is not None:
                first, last, places = moved
                before.append(first)
                after.append(last)
                outputs = [loop.outputs[place] for place in places]
                loop.drop_inputs(places)
                loop.keep_variables([place for place in range(loop.n_vars) if place not in places])
                replaced.tensors.update(zip(outputs, last.outputs, strict=True))
    return before, after


def pending_bytes(loop: WhileNode, block_bytes: int, *, on_card: bool = False) -> int | None:
    """Return the bytes of the rows that `batch_sums` has the loop hold at most, or None if only a run knows.

    Sums of products are there in place of the totals. A card holds half as many rows, but twice while it multiplies
    them: as it got them, and below one another.
    """
    found = [_block_of(group, block_bytes, on_card=on_card) for group in _groups(_sums(loop))]
    known = [each for each in found if each is not None]
    return sum(known) if len(known) == len(found) else None


def _block_of(group: Sequence[_ProductSum], block_bytes: int, *, on_card: bool) -> int | None:
    """Return the most bytes of rows that wait in a group of sums; None if only a run knows, and 0 if no rows wait."""
    products = [each.product for each in group if each.product.op is MATMUL]
    rows, columns = products[0].inputs[1].shape or (None, None)
    widths = [(product.inputs[0].shape or (None,))[0] for product in products]
    known = [width for width in widths if width is not None]
    if columns is None or len(known) < len(widths):
        return None
    width = sum(known)
    itemsize = products[0].outputs[0].dtype.itemsize
    if rows is None:
        return min(block_bytes, itemsize * enough_rows(width, columns) * (width + columns))
    most = rows_at_once(rows, width, columns, itemsize, block_bytes, on_card=on_card)
    return (2 if on_card else 1) * itemsize * most * (width + columns) if most > rows else 0


@dataclass(frozen=True, slots=True)
class _ProductSum:
    """A loop variable that adds up products.

    Attributes:
        output: what the loop leaves in it.
        adding: the nodes of the body between the product and its result.
        product: a `matmul`, or a `sum_to` of the rows.
    """

    output: Tensor
    adding: tuple[Node, ...]
    product: Node

    @property
    def right(self) -> Tensor:
        """The operand that other sums may share."""
        return self.product.inputs[-1 if self.product.op is MATMUL else 0]

    @property
    def origin(self) -> Tensor:
        """The matrix `right` before shape adjustments, which only a run may turn out to need."""
        found = self.right
        while found.node.op in (ENSURE_SHAPE, SUM_TO):
            before = found.node.inputs[0]
            if before.spec.rank != 2 or not is_compatible(before.shape, found.shape):
                break
            found = before
        return found


def _sums(loop: WhileNode) -> list[_ProductSum]:
    condition, body = loop.subgraphs
    uses = Counter(id(tensor) for node in body.nodes for tensor in node.inputs)
    uses.update(id(tensor) for tensor in body.results)
    in_condition = {tensor for node in condition.nodes for tensor in node.inputs} | set(condition.results)
    awaited = awaited_nodes(body) | awaited_nodes(condition)
    found: list[_ProductSum] = []
    for (variable, result), seen, output in zip(loop.carried, condition.inputs, loop.outputs, strict=False):
        if seen in in_condition or seen.node in awaited or uses[id(variable)] != 1 or variable.node in awaited:
            continue
        chain = _chain(variable, result)
        if chain is None:
            continue
        *adding, product = chain
        is_free = all(
            uses[id(node.outputs[0])] == 1 and node not in awaited and not node.control_inputs for node in chain
        )
        if is_free and len({node.device for node in chain}) == 1 and _is_summed_up(product, variable):
            found.append(_ProductSum(output, tuple(adding), product))
    return found


def _chain(variable: Tensor, result: Tensor) -> list[Node] | None:
    """Return the nodes from the result back to the term added to `variable`; None if it is not a plain sum."""
    chain: list[Node] = []
    node = result.node
    while node.op is ENSURE_SHAPE:
        chain.append(node)
        node = node.inputs[0].node
    if node.op is not ADD:
        return None
    left, right = node.inputs
    if variable is not left and variable is not right:
        return None
    term = right if variable is left else left
    return [*chain, node, term.node]


def _is_summed_up(product: Node, variable: Tensor) -> bool:
    """Return True if products of many iterations can be one product, and that is faster."""
    if product.op not in (MATMUL, SUM_TO):
        return False
    right = product.inputs[-1 if product.op is MATMUL else 0]
    if variable.dtype.name not in FAST or product.inputs[0].dtype != right.dtype:
        return False
    if right.shape is None or len(right.shape) != 2:
        return False
    if product.op is SUM_TO:
        columns = right.shape[1]
        return columns is not None and product.attrs["shape"] == (columns,) == variable.shape
    if product.inputs[0].spec.rank != 2 or variable.spec.rank != 2:
        return False
    left = product.inputs[0].shape
    assert left is not None
    if not is_static(left) or not is_static(right.shape):
        return True
    return variable.shape in (None, (left[0], right.shape[1])) and pays(left[1] or 0, left[0] or 0, right.shape[1] or 0)


def _groups(sums: Sequence[_ProductSum]) -> list[list[_ProductSum]]:
    """Group sums that may share their right operand, with a product among them."""
    groups: dict[tuple[int, str | None], list[_ProductSum]] = {}
    for each in sums:
        groups.setdefault((id(each.origin), each.product.device), []).append(each)
    return [group for group in groups.values() if any(each.product.op is MATMUL for each in group)]


def _carried(loop: WhileNode, inner: WhileNode, at: int) -> tuple[Node, Node, list[int]] | None:
    """Have `loop` carry the sums in a variable of an inner loop, if it does nothing else with the totals.

    Returns:
        Returns the nodes to stand in front of `loop` and behind it, and the places of the totals, for the caller to
        remove.
    """
    body, condition = loop.body, loop.predicate
    uses = Counter(id(tensor) for node in body.nodes for tensor in node.inputs)
    uses.update(id(tensor) for tensor in body.results)
    used_before = {tensor for node in condition.nodes for tensor in node.inputs} | set(condition.results)
    new, pending = inner.inputs[at].node, inner.outputs[at]
    made = next((node for node in body.nodes if node.op is SUMS and node.inputs[0] is pending), None)
    place_of = {id(tensor): place for place, tensor in enumerate(body.inputs[: loop.n_vars])}
    places = [place_of[id(tensor)] for tensor in new.inputs if id(tensor) in place_of]
    if made is None or len(places) < len(new.inputs) or uses[id(new.outputs[0])] != 1 or uses[id(pending)] != 1:
        return None
    for place, total in zip(places, made.outputs, strict=True):
        variable = body.inputs[place]
        if body.results[place] is not total or uses[id(variable)] != 1 or uses[id(total)] != 1:
            return None
        if condition.inputs[place] in used_before:
            return None
    awaited = awaited_nodes(body) | awaited_nodes(condition)
    if awaited & {new, made, *(body.inputs[place].node for place in places)}:
        return None
    initial = [loop.inputs[place] for place in places]
    first = detached_node(loop.graph, NEW_SUMS, initial, new.attrs, new, Spec(VARIANT), reserved_name=new.name)
    variable, output = loop.add_variable(first.outputs[0])
    inner.inputs[at] = variable
    body.results.append(pending)
    body.nodes[:] = [node for node in body.nodes if node is not new and node is not made]
    specs = tuple(loop.outputs[place].spec for place in places)
    return first, detached_node(loop.graph, SUMS, [output], {"values": specs}, made, specs), places


def _move(loop: WhileNode, group: Sequence[_ProductSum], block_bytes: int, on_card: bool) -> tuple[Node, Node]:
    """Replace the variables of `group` by one; return its first value, and the node behind the loop."""
    body = loop.body
    places = [total.output.index for total in group]
    like = next(total.product for total in group if total.product.op is MATMUL)
    initial = [loop.inputs[place] for place in places]
    specs = tuple(total.output.spec for total in group)
    name, made = f"{like.name}/pending_sums", {"block_bytes": block_bytes}  # this name appears in memory errors
    new = detached_node(loop.graph, NEW_SUMS, initial, made, like, Spec(VARIANT), reserved_name=name)
    inner, pending = loop.add_variable(new.outputs[0])
    numbers: dict[Tensor, int] = {}
    for total in group:
        for operand in (total.right, *total.product.inputs[:1]):
            numbers.setdefault(operand, len(numbers))
    operands = tuple(
        (numbers[total.right], numbers[total.product.inputs[0]] if total.product.op is MATMUL else -1)
        for total in group
    )
    attrs = {"operands": operands}
    adding = detached_node(body, ADD_PRODUCTS, [inner, *numbers], attrs, like, Spec(VARIANT), reserved_name=like.name)
    leaving = {node for total in group for node in (*total.adding, total.product)}
    last = max(index for index, node in enumerate(body.nodes) if node in leaving)
    body.nodes[:] = [*(node for node in body.nodes[:last] if node not in leaving), adding, *body.nodes[last + 1 :]]
    body.results.append(adding.outputs[0])
    loop.drop_inputs(places)
    loop.keep_variables([place for place in range(loop.n_vars) if place not in places])
    made_up = detached_node(loop.graph, SUMS, [pending], {"values": specs}, like, specs)
    if on_card:
        for node in (new, adding, made_up):
            node.colocated_with = like.colocated_with or new.name
    return new, made_up
