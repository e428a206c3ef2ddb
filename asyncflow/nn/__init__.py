"""Recurrent cells, loops over sequences, and losses, as ``af.nn``: functions, no layers.

A cell is a function ``cell(x, state) -> (output, state)`` of one step of a batch; `lstm_cell` and `gru_cell` are, once
they are given weights. `dynamic_rnn` runs any cell over sequences of different lengths. Losses are given for each
example; `sequence_mask` and `masked_mean` leave out what lies past a sequence's end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.foreign_names import public_names
from asyncflow.nn.dynamic_rnn import dynamic_rnn
from asyncflow.nn.gru import GRUWeights, gru_cell, gru_weights
from asyncflow.nn.initializers import glorot_uniform, orthogonal
from asyncflow.nn.losses import mean_squared_error, sigmoid_cross_entropy, softmax_cross_entropy
from asyncflow.nn.lstm import LSTMWeights, lstm_cell, lstm_weights
from asyncflow.nn.masks import masked_mean, sequence_mask

__all__ = [
    "GRUWeights",
    "LSTMWeights",
    "dynamic_rnn",
    "glorot_uniform",
    "gru_cell",
    "gru_weights",
    "lstm_cell",
    "lstm_weights",
    "masked_mean",
    "mean_squared_error",
    "orthogonal",
    "sequence_mask",
    "sigmoid_cross_entropy",
    "softmax_cross_entropy",
]

if not TYPE_CHECKING:  # or every misspelt name would pass the type checker
    __getattr__, __dir__ = public_names("asyncflow.nn", __all__)
