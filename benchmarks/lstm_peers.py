"""The training step of an LSTM layer in PyTorch, as a loop and as its own module, and in JAX."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.lstm import cell

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.lstm import Model, Residence, Step


def torch_loop(
    torch: Any,
    model: Model,
    outputs: int,
    counts: Sequence[int] | None = None,
    *,
    place: str = "cpu",
    residence: Residence = "fetched",
) -> Callable[[], Step]:
    """A loop in Python over the same cell; only the first ``counts[t]`` rows of step t, if given."""
    tensors = model.map(lambda value: torch.from_numpy(value).to(place))
    for tensor in tensors.parameters:
        tensor.requires_grad_()

    def work() -> Step:
        h, c = tensors.h, tensors.c
        xs = torch.from_numpy(model.xs).to(place) if residence == "fed" else tensors.xs
        total: Any = 0
        for t, x in enumerate(xs):
            if counts is not None:
                x, h, c = (each[: counts[t]] for each in (x, h, c))
            h, c = cell(torch, tensors, x, h, c)
            total = total + h.square().sum()
        loss = total / outputs
        return _torch_results(torch, loss, torch.autograd.grad(loss, tensors.parameters), residence)

    return work


def _torch_results(torch: Any, loss: Any, found: Sequence[Any], residence: Residence) -> Step:
    if residence == "resident":
        torch.cuda.synchronize()
        return loss.detach(), found
    return loss.detach().cpu(), [grad.cpu() for grad in found]


def torch_module(
    torch: Any,
    model: Model,
    outputs: int,
    lengths: Any = None,
    *,
    place: str = "cpu",
    residence: Residence = "fetched",
) -> Callable[[], Step]:
    """`torch.nn.LSTM`; with packed sequences, if `lengths` are given."""
    hidden = model.h.shape[-1]
    lstm = torch.nn.LSTM(hidden, hidden)
    # It has the same order of gates, and the weights of both products transposed.
    with torch.no_grad():
        for parameter, value in (
            (lstm.weight_ih_l0, model.w_x.T),
            (lstm.weight_hh_l0, model.w_h.T),
            (lstm.bias_ih_l0, model.bias),
            (lstm.bias_hh_l0, np.zeros_like(model.bias)),
        ):
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)))
    lstm = lstm.to(place)
    xs, h, c = (torch.from_numpy(value).to(place) for value in (model.xs, model.h[None], model.c[None]))
    h.requires_grad_()
    c.requires_grad_()
    parameters = lstm.weight_ih_l0, lstm.weight_hh_l0, lstm.bias_ih_l0, h, c

    def work() -> Step:
        fed = torch.from_numpy(model.xs).to(place) if residence == "fed" else xs
        if lengths is None:
            found = lstm(fed, (h, c))[0]
        else:
            found = lstm(torch.nn.utils.rnn.pack_padded_sequence(fed, lengths), (h, c))[0].data
        loss = found.square().sum() / outputs
        d_x, d_h, *others = torch.autograd.grad(loss, parameters)
        return _torch_results(torch, loss, (d_x.T, d_h.T, *others), residence)

    return work


def jax_scan(
    jax: Any, model: Model, outputs: int, *, place: Any = None, residence: Residence = "fetched"
) -> Callable[[], Step]:
    """`lax.scan`, compiled; `place` is one of its devices, None the default."""
    arrays = model.map(lambda value: jax.device_put(value, place))

    class Functions:
        sigmoid, tanh = staticmethod(jax.nn.sigmoid), staticmethod(jax.numpy.tanh)

    def loss_of(parameters: Any, xs: Any) -> Any:
        built = replace(model, **dict(zip(("w_x", "w_h", "bias", "h", "c"), parameters, strict=True)))

        def body(state: Any, x: Any) -> Any:
            h, c = cell(Functions, built, x, *state)
            return (h, c), h

        found = jax.lax.scan(body, (built.h, built.c), xs)[1]
        return (found**2).sum() / outputs

    function = jax.jit(jax.value_and_grad(loss_of))

    def work() -> Step:
        xs = jax.device_put(model.xs, place) if residence == "fed" else arrays.xs
        loss, found = function(arrays.parameters, xs)
        if residence == "resident":
            jax.block_until_ready((loss, found))
            return loss, found
        return np.asarray(loss), [np.asarray(grad) for grad in found]

    return work
