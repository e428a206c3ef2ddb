"""Row rules of Fourier transforms."""

from __future__ import annotations

from asyncflow.ops.rows.axes import along_with_size
from asyncflow.ops.rows.rule import row_rule
from asyncflow.ops.transforms.fft import FFT, IFFT, IRFFT, RFFT

row_rule(FFT, IFFT, RFFT, IRFFT)(along_with_size)
