"""Training steps, as ``af.optim``: functions that add nodes which change variables along their gradients.

`sgd`, `momentum` and `adam` take pairs of a gradient and a variable, and return the node that makes one step. State
kept from step to step is in variables of its own, beside the variable it belongs to. `minimize` does it in one line,
from a loss. Between the gradients and the step, `clip_by_value`, `clip_by_norm` and `clip_by_global_norm` bound the
gradients. `cosine_schedule` gives the learning rate of each step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.foreign_names import public_names
from asyncflow.optim.clipping import clip_by_global_norm, clip_by_norm, clip_by_value
from asyncflow.optim.minimize import minimize
from asyncflow.optim.schedules import cosine_schedule
from asyncflow.optim.steps import adam, momentum, sgd

__all__ = [
    "adam",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "cosine_schedule",
    "minimize",
    "momentum",
    "sgd",
]

if not TYPE_CHECKING:  # with `__getattr__`, every misspelt name would pass the type checker
    __getattr__, __dir__ = public_names("asyncflow.optim", __all__)
