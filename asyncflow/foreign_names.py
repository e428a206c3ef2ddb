"""The names that NumPy, TensorFlow, PyTorch and JAX have for what asyncflow calls otherwise.

Whoever types one is told ours: as a function of a module (`public_names`), as a method of a tensor, and as a function
of NumPy's that is called with one (`asyncflow.graph.values.no_value`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from threading import RLock
from types import MappingProxyType, ModuleType
from typing import Final, NoReturn

DISTRIBUTION: Final = "asyncflow-runtime"
"""Name of this project on the Python Package Index, where `asyncflow` is another project's."""

_ALSO_IN_NUMPY = (
    "abs acos acosh add all any argmax argmin argsort asin asinh astype atan atan2 atanh bincount bitwise_and "
    "bitwise_or bitwise_xor broadcast_arrays broadcast_to ceil clip concat conj copysign cos cosh count_nonzero "
    "cumulative_prod cumulative_sum diag diff divide einsum empty_like equal exp expand_dims expm1 flip floor "
    "floor_divide full_like greater greater_equal hypot imag isfinite isinf isnan less less_equal linspace log log10 "
    "log1p log2 logaddexp logical_and logical_not logical_or logical_xor matmul matrix_transpose max maximum mean "
    "meshgrid min minimum moveaxis multiply negative nextafter nonzero not_equal ones_like pad permute_dims positive "
    "pow prod quantile rank real reciprocal relu remainder repeat reshape roll round searchsorted segment_sum sigmoid "
    "sign signbit sin sinh size softmax sort split sqrt square squeeze stack std subtract sum take take_along_axis "
    "tan tanh tensordot tile trace tril triu trunc unique_counts unique_inverse unique_values unstack var vecdot "
    "where zeros_like"
)
_RENAMED: Final = (
    # NumPy
    "T=matrix_transpose absolute=abs amax=max amin=min array_split=split arccos=acos arccosh=acosh arcsin=asin "
    "arcsinh=asinh arctan=atan arctan2=atan2 arctanh=atanh around=round array=asarray bool_=bool concatenate=concat "
    "conjugate=conj cumprod=cumulative_prod cumsum=cumulative_sum dot=matmul double=float64 fabs=abs half=float16 "
    "invert=bitwise_invert left_shift=bitwise_left_shift mT=matrix_transpose mod=remainder ndarray=Tensor "
    "outer=linalg.outer power=pow right_shift=bitwise_right_shift rint=round single=float32 true_divide=divide "
    "unique=unique_values "
    # TensorFlow
    "Assert=assert_that Function=function Print=print TensorSpec=spec cast=astype clip_by_value=clip "
    "convert_to_tensor=asarray fill=full get_variable=Variable no_op=group range=arange reduce_all=all reduce_any=any "
    "reduce_logsumexp=logsumexp reduce_max=max reduce_mean=mean reduce_min=min reduce_prod=prod reduce_std=std "
    "reduce_sum=sum reduce_variance=var tensor_scatter_nd_add=scatter_add tensor_scatter_nd_update=scatter_update "
    "unsorted_segment_sum=segment_sum "
    # PyTorch
    "bmm=matmul cat=concat compile=function div=divide eq=equal from_numpy=constant ge=greater_equal gt=greater "
    "le=less_equal lt=less mm=matmul mul=multiply mv=matmul ne=not_equal neg=negative no_grad=stop_gradient "
    "sub=subtract tensor=constant topk=top_k unsqueeze=expand_dims view=reshape "
    # JAX
    "fori_loop=while_loop jit=function "
    # Of matrices, and Fourier transforms
    "inverse=linalg.inv"
)
"""Pairs of a name elsewhere and that of our function."""
_WRITTEN_OTHERWISE: Final = {
    # NumPy
    "append": "af.concat([x, y])",
    "load": "af.load_graph(path) for a graph, session.restore(path) for variables",
    "save": "af.save_graph(graph, path) for a graph, session.save(path) for variables",
    "argwhere": "af.stack(af.nonzero(x), axis=-1)",
    "average": "af.mean(x), or af.sum(x * w) / af.sum(w)",
    "convolve": "af.fftconvolve(x, y, mode), whose 'same' is as long as x",
    "column_stack": "af.concat(xs, axis=1), or af.stack(xs, axis=1) for vectors",
    "flatten": "af.reshape(x, (-1,))",
    "hstack": "af.concat(xs, axis=1), or axis=0 for vectors",
    "inner": "af.vecdot(x, y) for vectors, x @ y.mT for matrices",
    "median": "af.quantile(x, 0.5)",
    "percentile": "af.quantile(x, percent / 100)",
    "put": "af.index_update(x, key, values)",
    "ravel": "af.reshape(x, (-1,))",
    "swapaxes": "af.permute_dims(x, axes), or x.mT for the last two",
    "transpose": "af.permute_dims(x, axes), or x.mT for the last two",
    "vstack": "af.concat(xs, axis=0), or af.stack(xs) for vectors",
    # TensorFlow
    "GradientTape": "af.gradients(ys, xs)",
    "TensorShape": "a tuple, with None for an extent that is not known",
    "numpy_function": "@af.op above the function",
    "py_function": "@af.op above the function",
    # PyTorch
    "index_select": "af.take(x, indices, axis=axis)",
    "masked_fill": "af.where(mask, value, x)",
    "permute": "af.permute_dims(x, axes)",
    # JAX
    "grad": "af.gradients(ys, xs), or af.value_and_grad(f)",
    # Of matrices, and Fourier transforms
    "eig": "af.linalg.eigh, for symmetric and Hermitian matrices",
    "eigvals": "af.linalg.eigvalsh, for symmetric and Hermitian matrices",
    "fft2": "af.fft.fftn(x, axes=(-2, -1))",
    "ifft2": "af.fft.ifftn(x, axes=(-2, -1))",
    "irfft2": "af.fft.irfftn(x, axes=(-2, -1))",
    "lstsq": "af.linalg.pinv(a) @ b",
    "multi_dot": "a @ b @ c",
    "norm": "af.linalg.vector_norm or af.linalg.matrix_norm",
    "rfft2": "af.fft.rfftn(x, axes=(-2, -1))",
}
_ROOMS: Final = {
    "linalg": "cholesky cross det diagonal eigh eigvalsh inv matrix_norm matrix_power matrix_rank pinv qr slogdet "
    "solve svd svdvals vector_norm",
    "fft": "fft fftfreq fftn fftshift hfft ifft ifftn ifftshift ihfft irfft irfftn rfft rfftfreq rfftn",
}
FUNCTIONS: Final[Mapping[str, str]] = (
    {name: name for name in _ALSO_IN_NUMPY.split()}
    | {name: f"{room}.{name}" for room, names in _ROOMS.items() for name in names.split()}
    | dict(pair.split("=") for pair in _RENAMED.split())
    | _WRITTEN_OTHERWISE
)
"""Names of functions and methods of other libraries, each with the name or the code to write in asyncflow."""


def in_place_of(name: str, arguments: str = "") -> str | None:
    """A hint at what to write for a function or method that is called so elsewhere; None if nothing is known of it."""
    known = FUNCTIONS.get(name)
    return f"af.{known}{arguments}" if known is not None and re.fullmatch(r"[\w.]+", known) else known


_ADVICE: Final[Mapping[str, Mapping[str, str]]] = {
    "asyncflow": {
        "InteractiveSession": "async with af.Session(graph) as session",
        "autograd": "af.gradients(ys, xs)",
        "bfloat16": 'the name "bfloat16" as a dtype, with the package ml_dtypes installed',
        "global_variables_initializer": "nothing: a variable begins with the value it is made of",
        "isin": "af.any(af.expand_dims(x, axis=-1) == values, axis=-1)",
        "keras": "af.nn and af.optim, which are functions",
        "lax": "af.while_loop, af.cond and af.scan",
        "manual_seed": "af.Graph(seed=...)",
        "numpy": "the functions of asyncflow itself: af.sum, af.matmul, ...",
        "set_random_seed": "af.Graph(seed=...)",
        "testing": "import asyncflow.testing first",
        "train": "af.optim",
    },
    "asyncflow.nn": {
        "BatchNorm2d": "af.nn.batch_norm",
        "BCEWithLogitsLoss": "af.nn.sigmoid_cross_entropy",
        "CrossEntropyLoss": "af.nn.softmax_cross_entropy",
        "Dropout": "af.dropout",
        "Embedding": "af.embedding(ids, table), with the table a variable",
        "GRU": "af.nn.gru_cell in af.nn.dynamic_rnn",
        "GRUCell": "af.nn.gru_cell",
        "LSTM": "af.nn.lstm_cell in af.nn.dynamic_rnn",
        "LSTMCell": "af.nn.lstm_cell",
        "LayerNorm": "af.layer_norm",
        "Linear": "x @ w + b, with w and b variables; af.nn has functions, no layers",
        "MSELoss": "af.nn.mean_squared_error",
        "Module": "plain functions, with af.Variable for the weights; or af.from_torch(module)",
        "Parameter": "af.Variable",
        "RNN": "af.nn.dynamic_rnn",
        "Sequential": "plain functions, one called on the result of the other",
        "binary_cross_entropy_with_logits": "af.nn.sigmoid_cross_entropy",
        "cross_entropy": "af.nn.softmax_cross_entropy",
        "dropout": "af.dropout",
        "interpolate": "af.nn.resize",
        "kaiming_normal_": "af.nn.he_normal",
        "kaiming_uniform_": "af.nn.he_uniform",
        "mse_loss": "af.nn.mean_squared_error",
        "sigmoid_cross_entropy_with_logits": "af.nn.sigmoid_cross_entropy",
        "softmax_cross_entropy_with_logits": "af.nn.softmax_cross_entropy",
        "sparse_softmax_cross_entropy_with_logits": "af.nn.softmax_cross_entropy",
        "xavier_uniform_": "af.nn.glorot_uniform",
    }
    | {name: f"af.{name.lower()}" for name in ("GELU", "ReLU", "Sigmoid", "SiLU", "Softmax", "Softplus", "Tanh")}
    | {name: f"af.{name}" for name in ("embedding", "gelu", "layer_norm", "log_softmax", "relu", "sigmoid", "silu")}
    | {name: f"af.{name}" for name in ("softmax", "softplus", "tanh")},
    "asyncflow.optim": {
        "Adam": "af.optim.adam",
        "AdamOptimizer": "af.optim.adam",
        "GradientDescentOptimizer": "af.optim.sgd",
        "MomentumOptimizer": "af.optim.momentum",
        "SGD": "af.optim.sgd",
        "clip_grad_norm_": "af.optim.clip_by_global_norm",
    },
    "asyncflow.random": {
        "default_rng": "af.Graph(seed=...), and the functions here",
        "multinomial": "af.random.categorical",
        "rand": "af.random.uniform",
        "randint": "af.random.integers",
        "randn": "af.random.normal",
        "random": "af.random.uniform",
        "seed": "af.Graph(seed=...)",
        "shuffle": "af.random.permutation",
        "standard_normal": "af.random.normal",
        "truncated_normal_": "af.random.truncated_normal",
    },
}
"""By module, what to say in place of a name that some other library has there."""


def install(extra: str) -> str:
    """Return the command that installs an optional dependency: ``pip install 'asyncflow-runtime[plot]'``."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def close_names(name: str, known: Sequence[str]) -> list[str]:
    """Return at most three names that `name` may be a misspelling of; names that differ in case alone go first."""
    same = [each for each in known if each.casefold() == name.casefold() and each != name]
    return (same + [each for each in get_close_matches(name, known, n=3) if each not in same])[:3]


def public_names(module: str, public: Sequence[str]) -> tuple[Callable[[str], NoReturn], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a module: other names are refused with a hint, and public ones are listed.

    Args:
        module: its name, as users import it.
        public: its ``__all__``.
    """

    def refuse(name: str) -> NoReturn:
        raise AttributeError(f"module {module!r} has no attribute {name!r}{_hint(module, public, name)}", name=name)

    def listed() -> list[str]:
        return sorted(public)

    return refuse, listed


def facade(
    module: str,
    names: dict[str, object],
    *,
    modules: Collection[str] = (),
    homes: Mapping[str, str] = MappingProxyType({}),
    together: tuple[str, ...] = (),
) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of a module that exports all it has without an underscore in front.

    Args:
        module: its name, as users import it.
        names: its ``globals()``.
        modules: names of the modules that it exports; other modules in `names` have only been imported.
        homes: more names (``public=own`` where they differ), by the module that has them. Asking for one imports that.
        together: the modules whose names begin so are imported together.
    """
    places: dict[str, tuple[str, str]] = {}
    for home, listed in homes.items():
        for each in listed.split():
            public, _, own = each.partition("=")
            places[public] = f"{module}.{home}".rstrip("."), own or public
    group = [f"{module}.{home}" for home in homes if f"{home}.".startswith(together)]
    importing = RLock()  # one thread at a time: where their imports cross, Python gives one of them half a module

    def is_public(name: str) -> bool:
        is_ours = isinstance(names.get(name), ModuleType | type(annotations))
        return name in modules or not (name.startswith("_") or is_ours)

    def numbers_by_value(name: str) -> list[int | str]:
        return [int(part) if part.isdigit() else part for part in re.findall(r"\d+|\D+", name)]

    exported = sorted(filter(is_public, names.keys() | places), key=numbers_by_value)
    refuse, listed_names = public_names(module, exported)

    def find(name: str) -> object:
        if name not in places:
            refuse(name)
        home, own = places[name]
        with importing:
            if home in group:
                for each in group:
                    import_module(each)
            names[name] = import_module(f"{home}.{own}") if name in modules else getattr(import_module(home), own)
        return names[name]

    return exported, find, listed_names


def _hint(module: str, public: Sequence[str], name: str) -> str:
    if name.startswith("_"):
        return ""
    if (advice := _ADVICE.get(module, {}).get(name)) is not None:
        return f"; use {advice}"
    if (known := in_place_of(name)) is not None:
        return f"; use {known}"
    close = close_names(name, public)
    return f"; did you mean {' or '.join(close)}?" if close else ""
