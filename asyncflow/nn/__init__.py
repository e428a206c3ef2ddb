"""Recurrent cells, loops over sequences, and losses, as ``af.nn``: functions, no layers.

A cell is a function ``cell(x, state) -> (output, state)`` of one step of a batch; `lstm_cell` and `gru_cell` are, once
they are given weights. `dynamic_rnn` runs any cell over sequences of different lengths. Losses are given for each
example; `sequence_mask` and `masked_mean` leave out what lies past a sequence's end. `batch_norm`, `rms_norm` and
`group_norm` normalise layers. `conv2d`, `max_pool2d` and `resize` are layers of images. `scaled_dot_product_attention`
is the attention of transformers, and `rotary_embedding` gives it positions.
"""

from __future__ import annotations

import typing as _typing

from asyncflow.foreign_names import facade as _facade
from asyncflow.nn.attention import scaled_dot_product_attention as scaled_dot_product_attention
from asyncflow.nn.dynamic_rnn import dynamic_rnn as dynamic_rnn
from asyncflow.nn.gru import GRUWeights as GRUWeights
from asyncflow.nn.gru import gru_cell as gru_cell
from asyncflow.nn.gru import gru_weights as gru_weights
from asyncflow.nn.images.convolution import conv1d as conv1d
from asyncflow.nn.images.convolution import conv2d as conv2d
from asyncflow.nn.images.convolution import conv3d as conv3d
from asyncflow.nn.images.convolution import conv_transpose1d as conv_transpose1d
from asyncflow.nn.images.convolution import conv_transpose2d as conv_transpose2d
from asyncflow.nn.images.convolution import conv_transpose3d as conv_transpose3d
from asyncflow.nn.images.pooling import adaptive_avg_pool1d as adaptive_avg_pool1d
from asyncflow.nn.images.pooling import adaptive_avg_pool2d as adaptive_avg_pool2d
from asyncflow.nn.images.pooling import adaptive_avg_pool3d as adaptive_avg_pool3d
from asyncflow.nn.images.pooling import avg_pool1d as avg_pool1d
from asyncflow.nn.images.pooling import avg_pool2d as avg_pool2d
from asyncflow.nn.images.pooling import avg_pool3d as avg_pool3d
from asyncflow.nn.images.pooling import max_pool1d as max_pool1d
from asyncflow.nn.images.pooling import max_pool2d as max_pool2d
from asyncflow.nn.images.pooling import max_pool3d as max_pool3d
from asyncflow.nn.images.resize import resize as resize
from asyncflow.nn.initializers import glorot_uniform as glorot_uniform
from asyncflow.nn.initializers import he_normal as he_normal
from asyncflow.nn.initializers import he_uniform as he_uniform
from asyncflow.nn.initializers import orthogonal as orthogonal
from asyncflow.nn.losses import mean_squared_error as mean_squared_error
from asyncflow.nn.losses import sigmoid_cross_entropy as sigmoid_cross_entropy
from asyncflow.nn.losses import softmax_cross_entropy as softmax_cross_entropy
from asyncflow.nn.lstm import LSTMWeights as LSTMWeights
from asyncflow.nn.lstm import lstm_cell as lstm_cell
from asyncflow.nn.lstm import lstm_weights as lstm_weights
from asyncflow.nn.masks import masked_mean as masked_mean
from asyncflow.nn.masks import sequence_mask as sequence_mask
from asyncflow.nn.norms.batch_norm import batch_norm as batch_norm
from asyncflow.nn.norms.layers import group_norm as group_norm
from asyncflow.nn.norms.layers import rms_norm as rms_norm
from asyncflow.nn.rotary import rotary_embedding as rotary_embedding

if not _typing.TYPE_CHECKING:  # type checkers see the imports above; with `__getattr__` a misspelt name would pass
    __all__, __getattr__, __dir__ = _facade("asyncflow.nn", globals())
