// What the source of an elementwise kernel may use of CUDA and of CuPy's headers, for a C++ compiler of the host.
#include <algorithm>
#include <climits>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <ucontext.h>
#include <vector>

#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__
#define __global__
#define __shared__ static

using std::abs; using std::acos; using std::acosh; using std::asin; using std::asinh; using std::atan; using std::atan2;
using std::atanh; using std::cbrt; using std::ceil; using std::copysign; using std::cos; using std::cosh; using std::erf;
using std::erfc; using std::exp; using std::exp2; using std::expm1; using std::fabs; using std::floor; using std::fma;
using std::fmax; using std::fmin; using std::fmod; using std::hypot; using std::isfinite; using std::isinf;
using std::isnan; using std::ldexp; using std::lgamma; using std::log; using std::log10; using std::log1p;
using std::log2; using std::nearbyint; using std::nextafter; using std::pow; using std::remainder; using std::rint;
using std::round; using std::signbit; using std::sin; using std::sinh; using std::sqrt; using std::tan; using std::tanh;
using std::tgamma; using std::trunc;

namespace thrust { using std::complex; using std::real; using std::imag; using std::conj; using std::arg; }
using thrust::complex;

// A 16-bit float that computes in float, as CuPy's classes do; Traits converts.
template <typename Traits> struct Narrow {
  std::uint16_t bits;
  Narrow() = default;
  Narrow(float v) : bits(Traits::narrow(v)) {}
  explicit Narrow(bool v) : Narrow(float(v)) {}
  explicit Narrow(double v) : Narrow(float(v)) {}
  explicit Narrow(int v) : Narrow(float(v)) {}
  explicit Narrow(unsigned v) : Narrow(float(v)) {}
  explicit Narrow(long long v) : Narrow(float(v)) {}
  explicit Narrow(unsigned long long v) : Narrow(float(v)) {}
  operator float() const { return Traits::widen(bits); }
  template <typename T> Narrow& operator=(const T& v) { bits = static_cast<Narrow>(v).bits; return *this; }
  template <typename T> Narrow& operator+=(const T& v) { return *this = float(*this) + float(v); }
  template <typename T> Narrow& operator-=(const T& v) { return *this = float(*this) - float(v); }
  template <typename T> Narrow& operator*=(const T& v) { return *this = float(*this) * float(v); }
  template <typename T> Narrow& operator/=(const T& v) { return *this = float(*this) / float(v); }
};
inline std::uint32_t bits_of(float v) { std::uint32_t b; std::memcpy(&b, &v, 4); return b; }
inline float float_of(std::uint32_t b) { float v; std::memcpy(&v, &b, 4); return v; }
struct BrainFloat {
  static float widen(std::uint16_t b) { return float_of(std::uint32_t(b) << 16); }
  static std::uint16_t narrow(float v) {
    std::uint32_t b = bits_of(v);
    if (std::isnan(v)) return std::uint16_t(b >> 16 | 0x40);
    return std::uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16);
  }
};
struct HalfFloat {
  static float widen(std::uint16_t h) {
    int exponent = h >> 10 & 31, fraction = h & 1023;
    float size = exponent == 31 ? (fraction ? NAN : INFINITY)
               : exponent == 0  ? std::ldexp(float(fraction), -24)
                                : std::ldexp(float(fraction + 1024), exponent - 25);
    return h & 0x8000 ? -size : size;
  }
  static std::uint16_t narrow(float v) {
    std::uint16_t sign = bits_of(v) >> 16 & 0x8000;
    if (std::isnan(v)) return sign | 0x7e00;
    float size = std::fabs(v);
    if (size >= 65520.0f) return sign | 0x7c00;
    if (size < 6.103515625e-05f) return sign | std::uint16_t(std::nearbyint(std::ldexp(size, 24)));
    int exponent;
    float fraction = std::frexp(size, &exponent);
    long rounded = long(std::nearbyint(std::ldexp(fraction, 11)));
    return sign | std::uint16_t(((exponent + 13) << 10) + rounded);
  }
};
typedef Narrow<HalfFloat> float16;
typedef Narrow<BrainFloat> bfloat16;

// The smaller and the larger ignore a NaN, as CUDA's do.
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline double min(double a, double b) { return std::fmin(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }
inline double min(float a, double b) { return std::fmin(double(a), b); }
inline double max(float a, double b) { return std::fmax(double(a), b); }
inline double min(double a, float b) { return std::fmin(a, double(b)); }
inline double max(double a, float b) { return std::fmax(a, double(b)); }
#define ASYNCFLOW_MIN_MAX(T) \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; }
ASYNCFLOW_MIN_MAX(int) ASYNCFLOW_MIN_MAX(unsigned) ASYNCFLOW_MIN_MAX(long) ASYNCFLOW_MIN_MAX(unsigned long)
ASYNCFLOW_MIN_MAX(long long) ASYNCFLOW_MIN_MAX(unsigned long long)
inline bool isnan(float16 x) { return std::isnan(float(x)); }
inline bool isnan(bfloat16 x) { return std::isnan(float(x)); }
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float rsqrtf(float x) { return rsqrt(x); }
inline float fdividef(float x, float y) { return x / y; }
template <typename T> T __ldg(const T* p) { return *p; }
template <typename T> T atomicAdd(T* p, T v) { T old = *p; *p = old + v; return old; }

inline int _floor_divide(int x, int y) { if (y == 0) return 0; int q = x / y; return q - ((x < 0) != (y < 0) && q * y != x); }
inline long long _floor_divide(long long x, long long y) {
  if (y == 0) return 0;
  long long q = x / y;
  return q - ((x < 0) != (y < 0) && q * y != x);
}
inline unsigned _floor_divide(unsigned x, unsigned y) { return y == 0 ? 0 : x / y; }
inline unsigned long long _floor_divide(unsigned long long x, unsigned long long y) { return y == 0 ? 0 : x / y; }
inline float _floor_divide(float x, float y) { return std::floor(x / y); }
inline double _floor_divide(double x, double y) { return std::floor(x / y); }

// A `raw` argument, indexed as if it were flat, in C order.
template <typename T> struct Raw {
  T* data_;
  long long size_;
  T& operator[](long long i) const { return data_[i]; }
  long long size() const { return size_; }
};
struct Indexer {
  long long size_, i_;
  long long size() const { return size_; }
};

// Threads of a kernel of our own, which run one by one: in turns from barrier to barrier if it has barriers.
struct Extent { unsigned x, y, z; };
static Extent threadIdx, blockIdx, blockDim, gridDim;

// An address among a kernel's parameters: whatever is not in the memory that it points into is not touched.
template <typename T> struct Checked {
  char *at_, *low_, *high_;
  int* outside_;
  T& operator[](long long i) const {
    char* p = at_ + i * (long long)sizeof(T);
    if (p >= low_ && p + sizeof(T) <= high_) return *(T*)p;
    *outside_ = 1;
    static typename std::remove_const<T>::type nothing;
    return nothing;
  }
};

static ucontext_t asyncflow_block;
static std::vector<ucontext_t> asyncflow_threads;
static unsigned asyncflow_thread;
inline void __syncthreads() { swapcontext(&asyncflow_threads[asyncflow_thread], &asyncflow_block); }

static bool asyncflow_has_ended;
template <typename F> static F* asyncflow_kernel;
template <typename F> void asyncflow_ended() { (*asyncflow_kernel<F>)(); asyncflow_has_ended = true; }

// Runs all blocks, one after the other. Threads that have ended are not come to again.
template <typename F> void asyncflow_run(unsigned blocks, unsigned threads, bool has_barriers, F kernel) {
  gridDim = {blocks, 1, 1};
  blockDim = {threads, 1, 1};
  for (unsigned block = 0; block < blocks; ++block) {
    blockIdx = {block, 0, 0};
    if (!has_barriers) {
      for (unsigned thread = 0; thread < threads; ++thread) { threadIdx = {thread, 0, 0}; kernel(); }
      continue;
    }
    constexpr std::size_t room = 1 << 16;
    static std::vector<char> stacks;
    stacks.resize(threads * room);
    asyncflow_threads.resize(threads);
    asyncflow_kernel<F> = &kernel;
    for (unsigned thread = 0; thread < threads; ++thread) {
      ucontext_t& own = asyncflow_threads[thread];
      getcontext(&own);
      own.uc_stack.ss_sp = &stacks[thread * room];
      own.uc_stack.ss_size = room;
      own.uc_link = &asyncflow_block;
      makecontext(&own, (void (*)())asyncflow_ended<F>, 0);
    }
    std::vector<bool> ended(threads);
    for (unsigned left = threads; left;) {
      for (unsigned thread = 0; thread < threads; ++thread) {
        if (ended[thread]) continue;
        threadIdx = {thread, 0, 0};
        asyncflow_thread = thread;
        asyncflow_has_ended = false;
        swapcontext(&asyncflow_block, &asyncflow_threads[thread]);
        if (asyncflow_has_ended) { ended[thread] = true; --left; }
      }
    }
  }
}
