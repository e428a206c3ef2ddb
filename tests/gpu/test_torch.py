"""T15: modules of PyTorch on a device's own stream, and arrays from and to PyTorch and JAX."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.cuda.device import CudaDevice
from tests.gpu import cupti
from tests.gpu.card import Card
from tests.gpu.figures import Figures
from tests.gpu.on_loop import on_loop

BATCH, HIDDEN = 32, 64


def _torch() -> Any:
    return importlib.import_module("torch")


def _module(torch: Any, place: str) -> Any:
    torch.manual_seed(0)
    layers = torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, 1)
    return torch.nn.Sequential(*layers).to(place)


def _by_hand(torch: Any, module: Any, x: np.ndarray) -> list[np.ndarray]:
    """The loss and its gradients in plain torch."""
    leaf = torch.from_numpy(x).to(module[0].weight.device).requires_grad_()
    loss = module(torch.tanh(leaf)).square().sum()
    names = dict(module.named_parameters())
    return [v.detach().cpu().numpy() for v in (loss, *torch.autograd.grad(loss, [leaf, names["0.weight"]]))]


def _program(module: Any) -> tuple[af.Graph, af.Tensor, list[af.Tensor]]:
    with af.Graph() as graph:
        x = af.placeholder("float32", (BATCH, HIDDEN))
        op = af.from_torch(module)
        weight = af.Variable(op.parameters()["0.weight"], name="weight").read()
        loss = af.sum(af.square(op(af.tanh(x), params={"0.weight": weight})))
        return graph, x, [loss, *af.gradients(loss, [x, weight])]


async def _compare(session: af.Session, torch: Any, module: Any, x: af.Tensor, fetches: list[af.Tensor]) -> None:
    """Compare the program's values with plain torch's, a few times."""
    random_ = np.random.default_rng(0)
    for _ in range(10):
        fed = random_.standard_normal((BATCH, HIDDEN), np.float32)
        for found, wanted in zip(await session.run(fetches, {x: fed}), _by_hand(torch, module, fed), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.needs("torch")
@on_loop
async def test_t15_the_program_of_these_tests_on_a_cpu(card: Card) -> None:
    torch = _torch()
    module = _module(torch, "cpu")
    graph, x, fetches = _program(module)
    async with af.Session(graph) as session:
        await _compare(session, torch, module, x, fetches)


@pytest.mark.needs("card", "torch")
@on_loop
async def test_t15_a_module_and_its_gradient(card: Card, figures: Figures) -> None:
    torch = _torch()
    module = _module(torch, "cuda:0")
    graph, x, fetches = _program(module)
    async with af.Session(graph, devices=["cuda:0"]) as session:
        await _compare(session, torch, module, x, fetches)
        before = figures["torch_bytes"] = torch.cuda.memory_allocated()
        for _ in range(3):
            await _compare(session, torch, module, x, fetches)
        # No more than one run's worth: what is not referenced any more has come back.
        assert torch.cuda.memory_allocated() <= before + 16 * 4 * BATCH * HIDDEN


@pytest.mark.needs("card", "torch")
@on_loop
async def test_t15_torch_and_the_device_wait_for_no_event_of_each_other(card: Card, figures: Figures) -> None:
    """Between kernels of the module and the kernels around it there are no more waits than without the module."""
    torch = _torch()
    x = np.ones((BATCH, HIDDEN), np.float32)

    async def waits(function: Any) -> int:
        with af.Graph() as graph:
            fed = af.placeholder("float32", (BATCH, HIDDEN))
            y = af.tanh(fed)
            for _ in range(10):
                y = function(y) * 0.5
        async with af.Session(graph, devices=["cuda:0"]) as session:
            for _ in range(5):
                await session.run(y, {fed: x})
            with cupti.profiled() as found:
                await session.run(y, {fed: x})
        return sum(record.name.startswith("cudaStreamWaitEvent") for record in found)

    with_torch = await waits(af.from_torch(torch.tanh, outputs=af.spec("float32", (BATCH, HIDDEN))))
    figures["waits_with_torch"], figures["waits_without"] = with_torch, await waits(af.tanh)
    assert with_torch <= figures["waits_without"]


@pytest.mark.needs("card", "torch")
@on_loop
async def test_t15_tensors_of_torch_are_fed_and_given(card: Card) -> None:
    """Tensors stay where they are: nothing goes through the host."""
    torch = _torch()
    with af.Graph() as graph:
        x = af.placeholder("float32", (None, HIDDEN))
        y = af.tanh(x) * 2.0
    async with af.Session(graph, devices=["cuda:0"]) as session:
        device = session.devices[0]
        assert isinstance(device, CudaDevice)
        for index in range(20):
            tensor = torch.full((BATCH * 64, HIDDEN), index / 10, device="cuda:0")
            # torch writes it on a stream of its own, and is not waited for here.
            tensor = tensor + 1.0
            kept = await session.run(af.on_device(y), {x: tensor})
            np.testing.assert_allclose(
                torch.from_dlpack(kept).cpu().numpy(), np.tanh(tensor.cpu().numpy()) * 2.0, rtol=1e-5
            )


@pytest.mark.needs("card", "jax")
@on_loop
async def test_t15_arrays_of_jax_are_fed_and_given(card: Card) -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = importlib.import_module("jax")
    with af.Graph() as graph:
        x = af.placeholder("float32", (None, HIDDEN))
        y = af.tanh(x) * 2.0
    async with af.Session(graph, devices=["cuda:0"]) as session:
        for index in range(5):
            array = jax.numpy.full((BATCH * 64, HIDDEN), index / 10, dtype="float32")
            kept = await session.run(af.on_device(y), {x: array})
            back = jax.dlpack.from_dlpack(kept)
            np.testing.assert_allclose(np.asarray(back), np.tanh(np.asarray(array)) * 2.0, rtol=1e-5)
