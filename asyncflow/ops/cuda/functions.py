"""C++ functions that the expressions of `cuda_source` call: NumPy's arithmetic where C++ has other special cases."""

from __future__ import annotations

import re

_FLOAT_HELPERS = """
__device__ inline {t} asyncflow_remainder{s}({t} a, {t} b) {{
  const {t} r = fmod{s}(a, b);
  if (b == 0) return r;
  if (r == 0) return copysign{s}({zero}, b);
  return (b < 0) != (r < 0) ? r + b : r;
}}
__device__ inline {t} asyncflow_floor_divide{s}({t} a, {t} b) {{
  if (b == 0) return a / b;
  const {t} r = fmod{s}(a, b);
  {t} q = (a - r) / b;
  if (r != 0 && (b < 0) != (r < 0)) q -= 1;
  if (q == 0) return copysign{s}({zero}, a / b);
  const {t} whole = floor{s}(q);
  return q - whole > {half} ? whole + 1 : whole;
}}
__device__ inline {t} asyncflow_logaddexp{s}({t} a, {t} b) {{
  if (a == b) return a + {log2};
  const {t} d = a - b;
  if (d > 0) return a + log1p{s}(exp{s}(-d));
  if (d <= 0) return b + log1p{s}(exp{s}(d));
  return d;
}}
"""

_HELPERS = (
    """
template <typename T> __device__ inline T asyncflow_maximum(T a, T b) { return a >= b || a != a ? a : b; }
template <typename T> __device__ inline T asyncflow_minimum(T a, T b) { return a <= b || a != a ? a : b; }
template <typename T> __device__ inline T asyncflow_integer_remainder(T a, T b) {
  if (b == 0 || b == -1) return 0;
  const T r = a % b;
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
template <typename T> __device__ inline T asyncflow_integer_floor_divide(T a, T b) {
  if (b == 0) return 0;
  if (b == -1) return static_cast<T>(0ull - static_cast<unsigned long long>(a));
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}
template <typename T, typename U> __device__ inline T asyncflow_integer_power(T base, T exponent) {
  if (!(exponent >= 0)) return base == 1 ? 1 : base != static_cast<T>(-1) ? 0 : exponent % 2 ? base : 1;
  U result = 1, factor = static_cast<U>(base);
  for (T left = exponent; left > 0; left /= 2, factor *= factor)
    if (left % 2) result *= factor;
  return static_cast<T>(result);
}
"""
    + _FLOAT_HELPERS.format(t="float", s="f", zero="0.0f", half="0.5f", log2="0.6931471805599453f")
    + _FLOAT_HELPERS.format(t="double", s="", zero="0.0", half="0.5", log2="0.6931471805599453")
)

_HELPER_NAMES = re.compile(r"\basyncflow_\w+")


def helpers(text: str) -> str:
    """The definitions of the functions that `text`, some expressions, calls."""
    called = set(_HELPER_NAMES.findall(text))
    definitions = re.split(r"\n(?=template|__device__)", _HELPERS.strip())
    return "\n".join(found for found in definitions if called & set(_HELPER_NAMES.findall(found)))
