"""Random calls of convolution and pooling, and plain loops that compute the same."""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import numpy as np

FUNCTIONS = [
    f"{name}{rank}d"
    for name in ("conv", "conv_transpose", "max_pool", "avg_pool", "adaptive_avg_pool")
    for rank in (1, 2, 3)
]
LAYOUTS = {1: "NWC", 2: "NHWC", 3: "NDHWC"}
Array = np.ndarray[Any, Any]


class Case(NamedTuple):
    """One call: the function's name, its arrays with channels first, and other arguments."""

    name: str
    arrays: list[Array]
    options: dict[str, Any]

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return int(self.name[-2])


def random_case(random: np.random.Generator, name: str | None = None) -> Case:
    """Return a call that is right: windows fit, and groups divide the channels."""
    name = name or str(random.choice(FUNCTIONS))
    rank, kind = int(name[-2]), name[:-2]
    stride, dilation = ([int(each) for each in random.integers(1, 4, rank)] for _ in range(2))
    kernel = [int(each) for each in random.integers(1, 4, rank)]
    reach = [gap * (size - 1) + 1 for gap, size in zip(dilation, kernel, strict=True)]
    padding = [int(random.integers(0, most + 1)) for most in (reach if "conv" in kind else [n // 2 for n in kernel])]
    # PyTorch's 3-D pools compare windows with the input alone.
    least = [n if "pool3d" in name else max(1, n - 2 * width) for n, width in zip(reach, padding, strict=True)]
    if kind == "max_pool":  # else a dilated window may have padding alone
        least = [max(n, gap) for n, gap in zip(least, dilation, strict=True)]
    sizes = [int(n + random.integers(0, 5)) for n in least]
    groups = int(random.integers(1, 4))
    own, each = (int(n) for n in random.integers(1, 4, 2))
    batch = [[], [0], [1], [3]][int(random.integers(4))] if random.random() < 0.5 else [2]
    x = random.standard_normal((*batch, groups * own, *sizes))
    if kind == "adaptive_avg_pool":
        # PyTorch takes None for several axes only.
        asked = tuple(None if rank > 1 and random.random() < 0.2 else int(random.integers(1, 6)) for _ in sizes)
        return Case(name, [x], {"output_size": asked})
    options: dict[str, Any] = {"stride": stride, "padding": padding}
    if kind == "conv":
        if random.random() < 0.2:
            options = {"stride": 1, "padding": "same"}
        options |= {"dilation": dilation, "groups": groups}
        return Case(name, [x, *_weights(random, (groups * each, own, *kernel), groups * each)], options)
    if kind == "conv_transpose":
        added = [int(random.integers(0, max(pair))) for pair in zip(stride, dilation, strict=True)]
        sizes = [max(n, 2 + 2 * width) for n, width in zip(sizes, padding, strict=True)]
        x = random.standard_normal((*batch, groups * own, *sizes))
        options |= {"output_padding": added, "dilation": dilation, "groups": groups}
        return Case(name, [x, *_weights(random, (groups * own, each, *kernel), groups * each)], options)
    options |= {"kernel_size": kernel, "ceil_mode": bool(random.random() < 0.5)}
    if kind == "max_pool":
        return Case(name, [x], options | {"dilation": dilation})
    options["count_include_pad"] = bool(random.random() < 0.5)
    if rank > 1 and random.random() < 0.3:
        options["divisor_override"] = int(random.integers(1, 5))
    return Case(name, [x], options)


def _weights(random: np.random.Generator, shape: tuple[int, ...], filters: int) -> list[Array]:
    bias = [random.standard_normal(filters)] if random.random() < 0.5 else []
    return [random.standard_normal(shape), *bias]


def plain(case: Case) -> Array:
    """Return the result by loops over all windows."""
    x, *rest = case.arrays
    is_alone = x.ndim == case.rank + 1
    found = _WAYS[case.name[:-2]](x[None] if is_alone else x, *rest[:1], **case.options)
    if rest[1:]:
        found += rest[1].reshape(-1, *[1] * case.rank)
    return found[0] if is_alone else found


def _conv(x: Array, w: Array, stride: Any, padding: Any, dilation: Any, groups: int) -> Array:
    kernel = w.shape[2:]
    if padding == "same":
        whole = [gap * (size - 1) for gap, size in zip(dilation, kernel, strict=True)]
        widths = [(n // 2, n - n // 2) for n in whole]
        stride = [1] * len(kernel)
    else:
        widths = [(n, n) for n in padding]
    padded = np.pad(x, [(0, 0), (0, 0), *widths])
    out = [
        (n - gap * (size - 1) - 1) // step + 1
        for n, gap, size, step in zip(padded.shape[2:], dilation, kernel, stride, strict=True)
    ]
    y = np.zeros((len(x), len(w), *out))
    for place in np.ndindex(*out):
        at = tuple(
            slice(i * step, i * step + gap * (size - 1) + 1, gap)
            for i, step, gap, size in zip(place, stride, dilation, kernel, strict=True)
        )
        parts = np.split(padded[(slice(None), slice(None), *at)], groups, axis=1)
        terms = [
            p.reshape(len(p), f[0].size) @ f.reshape(len(f), -1).T
            for p, f in zip(parts, np.split(w, groups), strict=True)
        ]
        y[(slice(None), slice(None), *place)] = np.concatenate(terms, axis=1)
    return y


def _transpose(x: Array, w: Array, stride: Any, padding: Any, output_padding: Any, dilation: Any, groups: int) -> Array:
    kernel = w.shape[2:]
    out = [
        (n - 1) * step + gap * (size - 1) + more + 1
        for n, step, gap, size, more in zip(x.shape[2:], stride, dilation, kernel, output_padding, strict=True)
    ]
    y = np.zeros((len(x), groups * w.shape[1], *out))
    for place in np.ndindex(*x.shape[2:]):
        at = tuple(
            slice(i * step, i * step + gap * (size - 1) + 1, gap)
            for i, step, gap, size in zip(place, stride, dilation, kernel, strict=True)
        )
        parts = np.split(x[(slice(None), slice(None), *place)], groups, axis=1)
        terms = [np.einsum("nc,co...->no...", p, f) for p, f in zip(parts, np.split(w, groups), strict=True)]
        y[(slice(None), slice(None), *at)] += np.concatenate(terms, axis=1)
    return y[(slice(None), slice(None), *(slice(n, y.shape[2 + k] - n) for k, n in enumerate(padding)))]


def _pooled(x: Array, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Any:
    """Yield each place of the result, with the elements of its window and the number of them with padding."""
    out = []
    for n, size, step, width, gap in zip(x.shape[2:], kernel, stride, padding, dilation, strict=True):
        room = (n + 2 * width - gap * (size - 1) - 1) / step
        count = (ceil(room) if ceil_mode else int(room // 1)) + 1
        out.append(count - (ceil_mode and (count - 1) * step >= n + width))
    yield out
    for place in np.ndindex(*out):
        inner: list[list[int]] = []
        counted = 1
        for i, n, size, step, width, gap in zip(place, x.shape[2:], kernel, stride, padding, dilation, strict=True):
            every = [i * step - width + gap * k for k in range(size)]
            inner.append([each for each in every if 0 <= each < n])
            counted *= sum(each < n + width for each in every)
        yield place, x[np.ix_(range(len(x)), range(x.shape[1]), *inner)], counted


def _max_pool(x: Array, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool, dilation: Any = None) -> Array:
    places = _pooled(x, kernel_size, stride, padding, dilation, ceil_mode)
    y = np.zeros((*x.shape[:2], *next(places)))
    for place, window, _ in places:
        y[(slice(None), slice(None), *place)] = window.max(axis=tuple(range(2, x.ndim)))
    return y


def _avg_pool(
    x: Array,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None = None,
) -> Array:
    places = _pooled(x, kernel_size, stride, padding, [1] * len(kernel_size), ceil_mode)
    y = np.zeros((*x.shape[:2], *next(places)))
    for place, window, counted in places:
        divisor = divisor_override or (counted if count_include_pad else np.prod(window.shape[2:]))
        y[(slice(None), slice(None), *place)] = window.sum(axis=tuple(range(2, x.ndim))) / divisor
    return y


def _adaptive(x: Array, output_size: Any) -> Array:
    sizes = x.shape[2:]
    out = [n if count is None else count for n, count in zip(sizes, output_size, strict=True)]
    y = np.zeros((*x.shape[:2], *out))
    for place in np.ndindex(*out):
        at: list[Any] = [slice(i * n // m, ceil((i + 1) * n / m)) for i, n, m in zip(place, sizes, out, strict=True)]
        window: Any = (slice(None), slice(None), *at)
        y[(slice(None), slice(None), *place)] = x[window].mean(axis=tuple(range(2, x.ndim)))
    return y


_WAYS: dict[str, Any] = {
    "conv": _conv,
    "conv_transpose": _transpose,
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
    "adaptive_avg_pool": _adaptive,
}
