"""asyncflow: dataflow graphs with data-dependent control flow, awaited from async Python.

Everything public is here, or in a module of its own. There are `asyncflow.fft` (Fourier transforms), `asyncflow.linalg`
(decompositions, equations and norms of matrices) and `asyncflow.random` (seeded random ops). Models are made of
`asyncflow.nn` (recurrent cells, loops over sequences, losses) and `asyncflow.optim` (training steps). `asyncflow.raw`
has the control-flow primitives, `asyncflow.profiler` timelines of traced runs, and `asyncflow.cuda` awaits streams of
other libraries.
"""

from __future__ import annotations

import math as _math
import os.path as _path
import typing as _typing
import warnings as _warnings

from asyncflow.foreign_names import DISTRIBUTION as _DISTRIBUTION
from asyncflow.foreign_names import facade as _facade

if _typing.TYPE_CHECKING:
    from asyncflow import cuda as cuda
    from asyncflow import linalg as linalg
    from asyncflow import nn as nn
    from asyncflow import optim as optim
    from asyncflow import profiler as profiler
    from asyncflow import raw as raw
    from asyncflow.autodiff.gradients import gradients as gradients
    from asyncflow.autodiff.pieces.custom_gradient import custom_gradient as custom_gradient
    from asyncflow.autodiff.pieces.recompute import recompute as recompute
    from asyncflow.autodiff.stop_gradient import stop_gradient as stop_gradient
    from asyncflow.checkpoint.checkpoints import Restored as Restored
    from asyncflow.checkpoint.saver import Saver as Saver
    from asyncflow.compiler.program.kernels.device_kernels import kernels as kernels
    from asyncflow.compiler.program.kernels.device_kernels import register_kernel as register_kernel
    from asyncflow.control.case import case as case
    from asyncflow.control.case import switch_case as switch_case
    from asyncflow.control.cond import cond as cond
    from asyncflow.control.functional import foldl as foldl
    from asyncflow.control.functional import foldr as foldr
    from asyncflow.control.functional import scan as scan
    from asyncflow.control.stores.row_store import RowStore as RowStore
    from asyncflow.control.stores.tensor_array import TensorArray as TensorArray
    from asyncflow.control.while_loop import while_loop as while_loop
    from asyncflow.errors import AsyncflowError as AsyncflowError
    from asyncflow.errors import AxisError as AxisError
    from asyncflow.errors import CheckpointError as CheckpointError
    from asyncflow.errors import ClientDisconnected as ClientDisconnected
    from asyncflow.errors import DeadlineExceeded as DeadlineExceeded
    from asyncflow.errors import DeviceLostError as DeviceLostError
    from asyncflow.errors import DTypeError as DTypeError
    from asyncflow.errors import EndOfInput as EndOfInput
    from asyncflow.errors import FeedError as FeedError
    from asyncflow.errors import FetchError as FetchError
    from asyncflow.errors import GraphError as GraphError
    from asyncflow.errors import InternalError as InternalError
    from asyncflow.errors import KernelError as KernelError
    from asyncflow.errors import OutOfMemoryError as OutOfMemoryError
    from asyncflow.errors import OverloadedError as OverloadedError
    from asyncflow.errors import PlacementError as PlacementError
    from asyncflow.errors import QueueClosedError as QueueClosedError
    from asyncflow.errors import RaceWarning as RaceWarning
    from asyncflow.errors import ReplayError as ReplayError
    from asyncflow.errors import SessionClosedError as SessionClosedError
    from asyncflow.errors import ShapeError as ShapeError
    from asyncflow.graph.building.build import constant as constant
    from asyncflow.graph.building.build import group as group
    from asyncflow.graph.building.build import identity as identity
    from asyncflow.graph.building.build import placeholder as placeholder
    from asyncflow.graph.building.scopes import colocate_with as colocate_with
    from asyncflow.graph.building.scopes import control_dependencies as control_dependencies
    from asyncflow.graph.building.scopes import device as device
    from asyncflow.graph.building.scopes import name_scope as name_scope
    from asyncflow.graph.files import load_graph as load_graph
    from asyncflow.graph.files import save_graph as save_graph
    from asyncflow.graph.graph import Graph as Graph
    from asyncflow.graph.ir import Node as Node
    from asyncflow.graph.ir import Tensor as Tensor
    from asyncflow.graph.text.parse import parse_graph as parse_graph
    from asyncflow.graph.text.text import print_graph as print_graph
    from asyncflow.graph.values.dtypes import DType as DType
    from asyncflow.graph.values.dtypes import bool_ as _bool
    from asyncflow.graph.values.dtypes import complex64 as complex64
    from asyncflow.graph.values.dtypes import complex128 as complex128
    from asyncflow.graph.values.dtypes import float16 as float16
    from asyncflow.graph.values.dtypes import float32 as float32
    from asyncflow.graph.values.dtypes import float64 as float64
    from asyncflow.graph.values.dtypes import int8 as int8
    from asyncflow.graph.values.dtypes import int16 as int16
    from asyncflow.graph.values.dtypes import int32 as int32
    from asyncflow.graph.values.dtypes import int64 as int64
    from asyncflow.graph.values.dtypes import string as string
    from asyncflow.graph.values.dtypes import uint8 as uint8
    from asyncflow.graph.values.dtypes import uint16 as uint16
    from asyncflow.graph.values.dtypes import uint32 as uint32
    from asyncflow.graph.values.dtypes import uint64 as uint64
    from asyncflow.graph.values.spec import Spec as Spec
    from asyncflow.graph.values.spec import spec as spec
    from asyncflow.graph.verify import verify as verify
    from asyncflow.inputs.files import read_arrays as read_arrays
    from asyncflow.inputs.files import read_lines as read_lines
    from asyncflow.inputs.files import read_records as read_records
    from asyncflow.inputs.generators import from_async_generator as from_async_generator
    from asyncflow.inputs.input import Input as Input
    from asyncflow.inputs.loop_over import loop_over as loop_over
    from asyncflow.jacobians import hessian as hessian
    from asyncflow.jacobians import hvp as hvp
    from asyncflow.jacobians import jacobian as jacobian
    from asyncflow.lift.calls.batched import batched as batched
    from asyncflow.lift.map_fn import map_fn as map_fn
    from asyncflow.lift.vmap import vmap as vmap
    from asyncflow.ops.arithmetic.elementwise import abs as abs
    from asyncflow.ops.arithmetic.elementwise import acos as acos
    from asyncflow.ops.arithmetic.elementwise import acosh as acosh
    from asyncflow.ops.arithmetic.elementwise import add as add
    from asyncflow.ops.arithmetic.elementwise import asin as asin
    from asyncflow.ops.arithmetic.elementwise import asinh as asinh
    from asyncflow.ops.arithmetic.elementwise import atan as atan
    from asyncflow.ops.arithmetic.elementwise import atan2 as atan2
    from asyncflow.ops.arithmetic.elementwise import atanh as atanh
    from asyncflow.ops.arithmetic.elementwise import ceil as ceil
    from asyncflow.ops.arithmetic.elementwise import clip as clip
    from asyncflow.ops.arithmetic.elementwise import conj as conj
    from asyncflow.ops.arithmetic.elementwise import copysign as copysign
    from asyncflow.ops.arithmetic.elementwise import cos as cos
    from asyncflow.ops.arithmetic.elementwise import cosh as cosh
    from asyncflow.ops.arithmetic.elementwise import divide as divide
    from asyncflow.ops.arithmetic.elementwise import exp as exp
    from asyncflow.ops.arithmetic.elementwise import expm1 as expm1
    from asyncflow.ops.arithmetic.elementwise import floor as floor
    from asyncflow.ops.arithmetic.elementwise import floor_divide as floor_divide
    from asyncflow.ops.arithmetic.elementwise import hypot as hypot
    from asyncflow.ops.arithmetic.elementwise import imag as imag
    from asyncflow.ops.arithmetic.elementwise import log as log
    from asyncflow.ops.arithmetic.elementwise import log1p as log1p
    from asyncflow.ops.arithmetic.elementwise import log2 as log2
    from asyncflow.ops.arithmetic.elementwise import log10 as log10
    from asyncflow.ops.arithmetic.elementwise import logaddexp as logaddexp
    from asyncflow.ops.arithmetic.elementwise import maximum as maximum
    from asyncflow.ops.arithmetic.elementwise import minimum as minimum
    from asyncflow.ops.arithmetic.elementwise import multiply as multiply
    from asyncflow.ops.arithmetic.elementwise import negative as negative
    from asyncflow.ops.arithmetic.elementwise import nextafter as nextafter
    from asyncflow.ops.arithmetic.elementwise import positive as positive
    from asyncflow.ops.arithmetic.elementwise import pow as pow
    from asyncflow.ops.arithmetic.elementwise import real as real
    from asyncflow.ops.arithmetic.elementwise import reciprocal as reciprocal
    from asyncflow.ops.arithmetic.elementwise import remainder as remainder
    from asyncflow.ops.arithmetic.elementwise import round as round
    from asyncflow.ops.arithmetic.elementwise import sign as sign
    from asyncflow.ops.arithmetic.elementwise import sin as sin
    from asyncflow.ops.arithmetic.elementwise import sinh as sinh
    from asyncflow.ops.arithmetic.elementwise import sqrt as sqrt
    from asyncflow.ops.arithmetic.elementwise import square as square
    from asyncflow.ops.arithmetic.elementwise import subtract as subtract
    from asyncflow.ops.arithmetic.elementwise import tan as tan
    from asyncflow.ops.arithmetic.elementwise import tanh as tanh
    from asyncflow.ops.arithmetic.elementwise import trunc as trunc
    from asyncflow.ops.arithmetic.logic import bitwise_and as bitwise_and
    from asyncflow.ops.arithmetic.logic import bitwise_invert as bitwise_invert
    from asyncflow.ops.arithmetic.logic import bitwise_left_shift as bitwise_left_shift
    from asyncflow.ops.arithmetic.logic import bitwise_or as bitwise_or
    from asyncflow.ops.arithmetic.logic import bitwise_right_shift as bitwise_right_shift
    from asyncflow.ops.arithmetic.logic import bitwise_xor as bitwise_xor
    from asyncflow.ops.arithmetic.logic import equal as equal
    from asyncflow.ops.arithmetic.logic import greater as greater
    from asyncflow.ops.arithmetic.logic import greater_equal as greater_equal
    from asyncflow.ops.arithmetic.logic import isfinite as isfinite
    from asyncflow.ops.arithmetic.logic import isinf as isinf
    from asyncflow.ops.arithmetic.logic import isnan as isnan
    from asyncflow.ops.arithmetic.logic import less as less
    from asyncflow.ops.arithmetic.logic import less_equal as less_equal
    from asyncflow.ops.arithmetic.logic import logical_and as logical_and
    from asyncflow.ops.arithmetic.logic import logical_not as logical_not
    from asyncflow.ops.arithmetic.logic import logical_or as logical_or
    from asyncflow.ops.arithmetic.logic import logical_xor as logical_xor
    from asyncflow.ops.arithmetic.logic import not_equal as not_equal
    from asyncflow.ops.arithmetic.logic import signbit as signbit
    from asyncflow.ops.arrays.creation import arange as arange
    from asyncflow.ops.arrays.creation import asarray as asarray
    from asyncflow.ops.arrays.creation import empty as empty
    from asyncflow.ops.arrays.creation import empty_like as empty_like
    from asyncflow.ops.arrays.creation import eye as eye
    from asyncflow.ops.arrays.creation import from_dlpack as from_dlpack
    from asyncflow.ops.arrays.creation import full as full
    from asyncflow.ops.arrays.creation import full_like as full_like
    from asyncflow.ops.arrays.creation import linspace as linspace
    from asyncflow.ops.arrays.creation import meshgrid as meshgrid
    from asyncflow.ops.arrays.creation import ones as ones
    from asyncflow.ops.arrays.creation import ones_like as ones_like
    from asyncflow.ops.arrays.creation import tril as tril
    from asyncflow.ops.arrays.creation import triu as triu
    from asyncflow.ops.arrays.creation import zeros as zeros
    from asyncflow.ops.arrays.creation import zeros_like as zeros_like
    from asyncflow.ops.arrays.datatypes import astype as astype
    from asyncflow.ops.arrays.datatypes import broadcast_arrays as broadcast_arrays
    from asyncflow.ops.arrays.datatypes import broadcast_to as broadcast_to
    from asyncflow.ops.arrays.datatypes import can_cast as can_cast
    from asyncflow.ops.arrays.datatypes import finfo as finfo
    from asyncflow.ops.arrays.datatypes import iinfo as iinfo
    from asyncflow.ops.arrays.datatypes import isdtype as isdtype
    from asyncflow.ops.arrays.datatypes import result_type as result_type
    from asyncflow.ops.arrays.manipulation import concat as concat
    from asyncflow.ops.arrays.manipulation import expand_dims as expand_dims
    from asyncflow.ops.arrays.manipulation import flip as flip
    from asyncflow.ops.arrays.manipulation import moveaxis as moveaxis
    from asyncflow.ops.arrays.manipulation import permute_dims as permute_dims
    from asyncflow.ops.arrays.manipulation import repeat as repeat
    from asyncflow.ops.arrays.manipulation import reshape as reshape
    from asyncflow.ops.arrays.manipulation import roll as roll
    from asyncflow.ops.arrays.manipulation import squeeze as squeeze
    from asyncflow.ops.arrays.manipulation import stack as stack
    from asyncflow.ops.arrays.manipulation import tile as tile
    from asyncflow.ops.arrays.manipulation import unstack as unstack
    from asyncflow.ops.arrays.padding import pad as pad
    from asyncflow.ops.arrays.shape import rank as rank
    from asyncflow.ops.arrays.shape import shape as shape
    from asyncflow.ops.arrays.shape import size as size
    from asyncflow.ops.arrays.splitting import split as split
    from asyncflow.ops.checks.checks import assert_that as assert_that
    from asyncflow.ops.checks.checks import check_numerics as check_numerics
    from asyncflow.ops.checks.checks import print_ as _print
    from asyncflow.ops.indexing.indexing import gather as gather
    from asyncflow.ops.indexing.indexing import index_add as index_add
    from asyncflow.ops.indexing.indexing import index_update as index_update
    from asyncflow.ops.indexing.indexing import scatter_add as scatter_add
    from asyncflow.ops.indexing.indexing import scatter_update as scatter_update
    from asyncflow.ops.indexing.indexing import take as take
    from asyncflow.ops.indexing.indexing import take_along_axis as take_along_axis
    from asyncflow.ops.indexing.windows import dynamic_slice as dynamic_slice
    from asyncflow.ops.layers.dropout import dropout as dropout
    from asyncflow.ops.layers.erf import erf as erf
    from asyncflow.ops.layers.nn import embedding as embedding
    from asyncflow.ops.layers.nn import gelu as gelu
    from asyncflow.ops.layers.nn import layer_norm as layer_norm
    from asyncflow.ops.layers.nn import log_softmax as log_softmax
    from asyncflow.ops.layers.nn import logsumexp as logsumexp
    from asyncflow.ops.layers.nn import one_hot as one_hot
    from asyncflow.ops.layers.nn import relu as relu
    from asyncflow.ops.layers.nn import sigmoid as sigmoid
    from asyncflow.ops.layers.nn import silu as silu
    from asyncflow.ops.layers.nn import softmax as softmax
    from asyncflow.ops.layers.nn import softplus as softplus
    from asyncflow.ops.matrices.diagonals import diag as diag
    from asyncflow.ops.matrices.diagonals import trace as trace
    from asyncflow.ops.matrices.norms import cdist as cdist
    from asyncflow.ops.matrices.products import einsum as einsum
    from asyncflow.ops.matrices.products import matmul as matmul
    from asyncflow.ops.matrices.products import matrix_transpose as matrix_transpose
    from asyncflow.ops.matrices.products import tensordot as tensordot
    from asyncflow.ops.matrices.products import vecdot as vecdot
    from asyncflow.ops.random import random as random
    from asyncflow.ops.reductions.counts import count_nonzero as count_nonzero
    from asyncflow.ops.reductions.counts import histogram as histogram
    from asyncflow.ops.reductions.quantile import quantile as quantile
    from asyncflow.ops.reductions.segments import bincount as bincount
    from asyncflow.ops.reductions.segments import segment_sum as segment_sum
    from asyncflow.ops.reductions.statistical import cumulative_prod as cumulative_prod
    from asyncflow.ops.reductions.statistical import cumulative_sum as cumulative_sum
    from asyncflow.ops.reductions.statistical import max as max
    from asyncflow.ops.reductions.statistical import mean as mean
    from asyncflow.ops.reductions.statistical import min as min
    from asyncflow.ops.reductions.statistical import prod as prod
    from asyncflow.ops.reductions.statistical import std as std
    from asyncflow.ops.reductions.statistical import sum as sum
    from asyncflow.ops.reductions.statistical import var as var
    from asyncflow.ops.reductions.utility import all as all
    from asyncflow.ops.reductions.utility import any as any
    from asyncflow.ops.reductions.utility import diff as diff
    from asyncflow.ops.reductions.utility import nan_to_num as nan_to_num
    from asyncflow.ops.searching.searching import argmax as argmax
    from asyncflow.ops.searching.searching import argmin as argmin
    from asyncflow.ops.searching.searching import nonzero as nonzero
    from asyncflow.ops.searching.searching import searchsorted as searchsorted
    from asyncflow.ops.searching.searching import where as where
    from asyncflow.ops.searching.sets import unique_all as unique_all
    from asyncflow.ops.searching.sets import unique_counts as unique_counts
    from asyncflow.ops.searching.sets import unique_inverse as unique_inverse
    from asyncflow.ops.searching.sets import unique_values as unique_values
    from asyncflow.ops.searching.sorting import argsort as argsort
    from asyncflow.ops.searching.sorting import sort as sort
    from asyncflow.ops.searching.sorting import top_k as top_k
    from asyncflow.ops.transforms import fft as fft
    from asyncflow.ops.transforms.convolution import fftconvolve as fftconvolve
    from asyncflow.ops.user.batch import Batch as Batch
    from asyncflow.ops.user.batch import Pool as Pool
    from asyncflow.ops.user.custom import op as op
    from asyncflow.ops.user.from_torch import from_torch as from_torch
    from asyncflow.ops.user.step_policy import NextStep as NextStep
    from asyncflow.ops.user.step_policy import StepPolicy as StepPolicy
    from asyncflow.ops.user.step_policy import WaitingMember as WaitingMember
    from asyncflow.ops.user.step_policy import WaitUntil as WaitUntil
    from asyncflow.parameters import summary as summary
    from asyncflow.runtime.calls.calls import Prepared as Prepared
    from asyncflow.runtime.executor.kernels.limited_calls import LimitStatistics as LimitStatistics
    from asyncflow.runtime.gates.admission import SessionLoad as SessionLoad
    from asyncflow.runtime.session.function import Function as Function
    from asyncflow.runtime.session.function import function as function
    from asyncflow.runtime.session.namespace_info import NamespaceInfo as _NamespaceInfo
    from asyncflow.runtime.session.replay import replay as replay
    from asyncflow.runtime.session.session import Session as Session
    from asyncflow.runtime.session.session_statistics import DeviceMemory as DeviceMemory
    from asyncflow.runtime.session.session_statistics import SessionStatistics as SessionStatistics
    from asyncflow.runtime.session.value_and_grad import value_and_grad as value_and_grad
    from asyncflow.runtime.shared.batches import BatchStatistics as BatchStatistics
    from asyncflow.runtime.values.fetches import on_device as on_device
    from asyncflow.runtime.watch.trace import Trace as Trace
    from asyncflow.semantics.explore import Exploration as Exploration
    from asyncflow.semantics.explore import Outcome as Outcome
    from asyncflow.semantics.explore import explore as explore
    from asyncflow.semantics.races import Race as Race
    from asyncflow.semantics.races import allow_races as allow_races
    from asyncflow.semantics.races import find_races as find_races
    from asyncflow.state.containers import reset_container as reset_container
    from asyncflow.state.mutex import Barrier as Barrier
    from asyncflow.state.mutex import Mutex as Mutex
    from asyncflow.state.queues import FIFOQueue as FIFOQueue
    from asyncflow.state.queues import PaddingQueue as PaddingQueue
    from asyncflow.state.queues import PriorityQueue as PriorityQueue
    from asyncflow.state.queues import Queue as Queue
    from asyncflow.state.queues import ShuffleQueue as ShuffleQueue
    from asyncflow.state.table import Table as Table
    from asyncflow.state.variables.variable import Variable as Variable
    from asyncflow.streams.loop import run as run
    from asyncflow.vertex.function import Vertex as Vertex
    from asyncflow.vertex.function import VertexFunction as VertexFunction
    from asyncflow.vertex.function import vertex_function as vertex_function
    from asyncflow.vertex.map import vertex_map as vertex_map
    from asyncflow.vertex.structure.input_graph import InputGraph as InputGraph

    bool = _bool
    print = _print
    __array_namespace_info__ = _NamespaceInfo

_HOMES = {
    "": "cuda linalg nn optim profiler raw",
    "autodiff.gradients": "gradients",
    "autodiff.pieces.custom_gradient": "custom_gradient",
    "autodiff.pieces.recompute": "recompute",
    "autodiff.stop_gradient": "stop_gradient",
    "checkpoint.checkpoints": "Restored",
    "checkpoint.saver": "Saver",
    "compiler.program.kernels.device_kernels": "kernels register_kernel",
    "control.case": "case switch_case",
    "control.cond": "cond",
    "control.functional": "foldl foldr scan",
    "control.stores.row_store": "RowStore",
    "control.stores.tensor_array": "TensorArray",
    "control.while_loop": "while_loop",
    "errors": (
        "AsyncflowError AxisError CheckpointError ClientDisconnected DeadlineExceeded DeviceLostError DTypeError "
        "EndOfInput FeedError FetchError GraphError InternalError KernelError OutOfMemoryError OverloadedError "
        "PlacementError QueueClosedError RaceWarning ReplayError SessionClosedError ShapeError"
    ),
    "graph.building.build": "constant group identity placeholder",
    "graph.building.scopes": "colocate_with control_dependencies device name_scope",
    "graph.files": "load_graph save_graph",
    "graph.graph": "Graph",
    "graph.ir": "Node Tensor",
    "graph.text.parse": "parse_graph",
    "graph.text.text": "print_graph",
    "graph.values.dtypes": (
        "DType bool=bool_ complex64 complex128 float16 float32 float64 int8 int16 int32 int64 string uint8 uint16 "
        "uint32 uint64"
    ),
    "graph.values.spec": "Spec spec",
    "graph.verify": "verify",
    "inputs.files": "read_arrays read_lines read_records",
    "inputs.generators": "from_async_generator",
    "inputs.input": "Input",
    "inputs.loop_over": "loop_over",
    "jacobians": "hessian hvp jacobian",
    "lift.calls.batched": "batched",
    "lift.calls.pooled": "",  # tells `while_loop` of pools
    "lift.map_fn": "map_fn",
    "lift.vmap": "vmap",
    "ops.arithmetic.elementwise": (
        "abs acos acosh add asin asinh atan atan2 atanh ceil clip conj copysign cos cosh divide exp expm1 floor "
        "floor_divide hypot imag log log1p log2 log10 logaddexp maximum minimum multiply negative nextafter positive "
        "pow real reciprocal remainder round sign sin sinh sqrt square subtract tan tanh trunc"
    ),
    "ops.arithmetic.logic": (
        "bitwise_and bitwise_invert bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor equal greater "
        "greater_equal isfinite isinf isnan less less_equal logical_and logical_not logical_or logical_xor not_equal "
        "signbit"
    ),
    "ops.arrays.creation": (
        "arange asarray empty empty_like eye from_dlpack full full_like linspace meshgrid ones ones_like tril triu "
        "zeros zeros_like"
    ),
    "ops.arrays.datatypes": "astype broadcast_arrays broadcast_to can_cast finfo iinfo isdtype result_type",
    "ops.arrays.manipulation": (
        "concat expand_dims flip moveaxis permute_dims repeat reshape roll squeeze stack tile unstack"
    ),
    "ops.arrays.padding": "pad",
    "ops.arrays.shape": "rank shape size",
    "ops.arrays.splitting": "split",
    "ops.checks.checks": "assert_that check_numerics print=print_",
    "ops.indexing.indexing": "gather index_add index_update scatter_add scatter_update take take_along_axis",
    "ops.indexing.windows": "dynamic_slice",
    "ops.layers.dropout": "dropout",
    "ops.layers.erf": "erf",
    "ops.layers.nn": "embedding gelu layer_norm log_softmax logsumexp one_hot relu sigmoid silu softmax softplus",
    "ops.matrices.diagonals": "diag trace",
    "ops.matrices.norms": "cdist",
    "ops.matrices.products": "einsum matmul matrix_transpose tensordot vecdot",
    "ops.random": "random",
    "ops.reductions.counts": "count_nonzero histogram",
    "ops.reductions.quantile": "quantile",
    "ops.reductions.segments": "bincount segment_sum",
    "ops.reductions.statistical": "cumulative_prod cumulative_sum max mean min prod std sum var",
    "ops.reductions.utility": "all any diff nan_to_num",
    "ops.searching.searching": "argmax argmin nonzero searchsorted where",
    "ops.searching.sets": "unique_all unique_counts unique_inverse unique_values",
    "ops.searching.sorting": "argsort sort top_k",
    "ops.transforms": "fft",
    "ops.transforms.convolution": "fftconvolve",
    "ops.user.batch": "Batch Pool",
    "ops.user.custom": "op",
    "ops.user.from_torch": "from_torch",
    "ops.user.step_policy": "NextStep StepPolicy WaitUntil WaitingMember",
    "parameters": "summary",
    "runtime.calls.calls": "Prepared",
    "runtime.executor.kernels.limited_calls": "LimitStatistics",
    "runtime.gates.admission": "SessionLoad",
    "runtime.session.function": "Function function",
    "runtime.session.namespace_info": "__array_namespace_info__=NamespaceInfo",
    "runtime.session.replay": "replay",
    "runtime.session.session": "Session",
    "runtime.session.session_statistics": "DeviceMemory SessionStatistics",
    "runtime.session.value_and_grad": "value_and_grad",
    "runtime.shared.batches": "BatchStatistics",
    "runtime.values.fetches": "on_device",
    "runtime.watch.trace": "Trace",
    "semantics.explore": "Exploration Outcome explore",
    "semantics.races": "Race allow_races find_races",
    "state.containers": "reset_container",
    "state.mutex": "Barrier Mutex",
    "state.queues": "FIFOQueue PaddingQueue PriorityQueue Queue ShuffleQueue",
    "state.table": "Table",
    "state.variables.variable": "Variable",
    "streams.loop": "run",
    "vertex.function": "Vertex VertexFunction vertex_function",
    "vertex.map": "vertex_map",
    "vertex.structure.input_graph": "InputGraph",
}
"""Public names (``public=own`` where they differ), by the module that has them; asking for one imports it."""

_TOGETHER = ("control.", "graph.", "lift.", "ops.", "state.")
"""Rooms that are imported together, as a graph is built with them: each registers its rules with the rooms below."""

e = _math.e
inf = _math.inf
nan = _math.nan
newaxis = None
pi = _math.pi

__version__ = "0.2.0"
__array_api_version__ = "2024.12"

if _path.exists(_path.join(_path.dirname(_path.dirname(__file__)), "asyncflow.py")):
    _warnings.warn(
        f"asyncflow.py beside this package is another project's, `asyncflow` on the Python Package Index, and this one "
        f"is {_DISTRIBUTION}: pip uninstall asyncflow",
        stacklevel=2,
    )

if not _typing.TYPE_CHECKING:  # type checkers see the imports above; with `__getattr__` a misspelt name would pass
    __all__, __getattr__, __dir__ = _facade(
        "asyncflow",
        globals(),
        modules=("cuda", "fft", "linalg", "nn", "optim", "profiler", "random", "raw"),
        homes=_HOMES,
        together=_TOGETHER,
    )
