"""Imports every module of derivatives, which installs the rules."""

from __future__ import annotations

from asyncflow.ops.derivatives import builtin as builtin
from asyncflow.ops.derivatives import checks as checks
from asyncflow.ops.derivatives import creation as creation
from asyncflow.ops.derivatives import datatypes as datatypes
from asyncflow.ops.derivatives import decompositions as decompositions
from asyncflow.ops.derivatives import diagonals as diagonals
from asyncflow.ops.derivatives import elementwise as elementwise
from asyncflow.ops.derivatives import fft as fft
from asyncflow.ops.derivatives import indexing as indexing
from asyncflow.ops.derivatives import linalg as linalg
from asyncflow.ops.derivatives import logic as logic
from asyncflow.ops.derivatives import manipulation as manipulation
from asyncflow.ops.derivatives import nn as nn
from asyncflow.ops.derivatives import random as random
from asyncflow.ops.derivatives import recurrence as recurrence
from asyncflow.ops.derivatives import scatter as scatter
from asyncflow.ops.derivatives import searching as searching
from asyncflow.ops.derivatives import segments as segments
from asyncflow.ops.derivatives import sets as sets
from asyncflow.ops.derivatives import shapes as shapes
from asyncflow.ops.derivatives import sorting as sorting
from asyncflow.ops.derivatives import statistical as statistical
from asyncflow.ops.derivatives import utility as utility
