// Elementwise loops over the formulas of elementwise.h on CUDA: one kernel for all of them, which a
// functor turns into an op. A thread loads several packs of 16 bytes before it computes and stores,
// so that enough reads are under way to saturate the memory.
#include "kernels/elementwise.h"
#include "kernels/raw.cuh"

namespace cohort::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// Inputs and outputs of an elementwise loop: out[k][i] (+)= fn(in[0][i], in[1][i], ...)[k]. A null
// output is skipped.
template <class In, class Out, class Fn>
struct Loop {
  static constexpr int kIn = Fn::kIn, kOut = Fn::kOut;
  const In* in[kIn];
  Out* out[kOut];
  bool accumulate[kOut];
  Fn fn;

  template <int N>
  struct Values {
    Raw<In, N> in[kIn];
    Raw<Out, N> old[kOut];
  };
  template <int N>
  __device__ __forceinline__ void load(int64_t i, Values<N>& values) const {
#pragma unroll
    for (int k = 0; k < kIn; ++k) values.in[k] = load_raw<N>(in[k] + i);
    if constexpr (Fn::kAccumulates) {
#pragma unroll
      for (int k = 0; k < kOut; ++k)
        if (accumulate[k]) values.old[k] = load_raw<N>(out[k] + i);
    }
  }
  template <int N>
  __device__ __forceinline__ void store(int64_t i, const Values<N>& values) const {
    float result[kOut][N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float x[kIn], y[kOut];
#pragma unroll
      for (int k = 0; k < kIn; ++k) x[k] = element(values.in[k], n);
      fn(x, y);
#pragma unroll
      for (int k = 0; k < kOut; ++k) result[k][n] = y[k];
    }
#pragma unroll
    for (int k = 0; k < kOut; ++k) {
      if (out[k] == nullptr) continue;
      if (Fn::kAccumulates && accumulate[k]) {
#pragma unroll
        for (int n = 0; n < N; ++n) result[k][n] += element(values.old[k], n);
      }
      store_raw(out[k] + i, to_raw<Out>(result[k]));
    }
  }
};

// The first `packs` packs of N elements by wide accesses, the rest of n one by one.
template <int N, int kUnroll, class Loop>
__global__ void __launch_bounds__(kThreads, 4)
    elementwise_kernel(Loop loop, int64_t n, int64_t packs) {
  loop.fn.begin();
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kUnroll) + threadIdx.x;
  typename Loop::template Values<N> values[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u)
    if (first + u * kThreads < packs) loop.template load<N>((first + u * kThreads) * N, values[u]);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u)
    if (first + u * kThreads < packs) loop.template store<N>((first + u * kThreads) * N, values[u]);

  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = packs * N + int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += step) {
    typename Loop::template Values<1> value;
    loop.template load<1>(i, value);
    loop.template store<1>(i, value);
  }
}

template <class In, class Out, class Fn>
void run(const char* name, const Loop<In, Out, Fn>& loop, int64_t n, Device device) {
  constexpr int kWidth = kPackSize<std::conditional_t<(sizeof(In) > sizeof(Out)), In, Out>>;
  constexpr int kUnroll = Fn::kIn + Fn::kOut <= 2 ? 4 : 2;
  bool wide = true;
  for (const In* p : loop.in) wide &= aligned(p);
  for (const Out* p : loop.out) wide &= aligned(p);
  const int64_t packs = wide ? n / kWidth : 0;
  launch(name, elementwise_kernel<kWidth, kUnroll, Loop<In, Out, Fn>>,
         {blocks_for(n, int64_t{kThreads} * kUnroll * kWidth), kThreads}, device, loop, n, packs);
}

// What an op computes for one element, in f32. begin() runs once in every thread.
template <int kInputs, int kOutputs, Grad kMode>
struct Formula {
  static constexpr int kIn = kInputs, kOut = kOutputs;
  static constexpr bool kAccumulates = kMode == Grad::kAccumulate;
  __device__ void begin() {}
};
template <class Op>
struct UnaryForward : Formula<1, 1, Grad::kOverwrite> {
  __device__ void operator()(const float (&x)[1], float (&y)[1]) const { y[0] = Op::forward(x[0]); }
};
template <class Op>
struct UnaryBackward : Formula<3, 1, Grad::kAccumulate> {  // of dy, x, y
  __device__ void operator()(const float (&in)[3], float (&dx)[1]) const {
    dx[0] = in[0] * Op::derivative(in[1], in[2]);
  }
};
template <class Op>
struct BinaryForward : Formula<2, 1, Grad::kOverwrite> {
  __device__ void operator()(const float (&in)[2], float (&y)[1]) const {
    y[0] = Op::forward(in[0], in[1]);
  }
};
template <class Op>
struct BinaryBackward : Formula<3, 2, Grad::kAccumulate> {  // of dy, a, b
  __device__ void operator()(const float (&in)[3], float (&d)[2]) const {
    d[0] = in[0] * Op::da(in[1], in[2]);
    d[1] = in[0] * Op::db(in[1], in[2]);
  }
};
// factor x; the factor comes from the device's memory where `source` is given.
struct Scale : Formula<1, 1, Grad::kAccumulate> {
  const float* source;
  float factor;
  Scale(const float* source, float factor) : source(source), factor(factor) {}
  __device__ void begin() {
    if (source != nullptr) factor = *source;
  }
  __device__ void operator()(const float (&x)[1], float (&y)[1]) const { y[0] = factor * x[0]; }
};

// The device's value everywhere. The input is not looked at, so it is not read either.
struct Fill : Formula<1, 1, Grad::kAccumulate> {
  const float* source;
  float value = 0;
  explicit Fill(const float* source) : source(source) {}
  __device__ void begin() { value = *source; }
  __device__ void operator()(const float (&)[1], float (&y)[1]) const { y[0] = value; }
};

// Sums: a block adds kSumPacks packs per thread, in an order that depends on n only; one block then
// adds the blocks' sums in f64.
constexpr int kSumPacks = 16, kJoinThreads = 1024;

// kWhole: the block's packs are all inside and aligned.
template <class T, bool kWhole>
__device__ __forceinline__ float thread_sum(const T* x, int64_t n) {
  constexpr int N = kPackSize<T>;
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kSumPacks) + threadIdx.x;
  float sum = 0;
#pragma unroll 8
  for (int k = 0; k < kSumPacks; ++k) {
    const int64_t i = (first + k * kThreads) * N, left = n - i;
    Raw<T, N> raw;
    if constexpr (kWhole)
      raw = load_raw<N>(x + i);
    else
      raw = load_some<N>(x + i, left < N ? static_cast<int>(left) : N);
#pragma unroll
    for (int j = 0; j < N; ++j) sum += element(raw, j);
  }
  return sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const T* x, int64_t n, bool wide, float* partial) {
  __shared__ float scratch[kThreads / 32];
  constexpr int64_t kBlock = int64_t{kThreads} * kSumPacks * kPackSize<T>;
  const bool whole = wide && (int64_t{blockIdx.x} + 1) * kBlock <= n;
  const float mine = whole ? thread_sum<T, true>(x, n) : thread_sum<T, false>(x, n);
  const float total = block_reduce<kThreads>(mine, scratch, Plus{});
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kJoinThreads)
    join_kernel(const float* partial, int64_t n, float* y, bool accumulate) {
  __shared__ double scratch[kJoinThreads / 32];
  double mine = 0;
  for (int64_t i = threadIdx.x; i < n; i += kJoinThreads) mine += static_cast<double>(partial[i]);
  const double total = block_reduce<kJoinThreads>(mine, scratch, Plus{});
  if (threadIdx.x == 0)
    *y = static_cast<float>(accumulate ? static_cast<double>(*y) + total : total);
}

bool adds(Grad mode) {
  return mode == Grad::kAccumulate;
}

template <class Op>
void unary_forward(const char* name, Tensor& y, const Tensor& x) {
  dispatch_device(x.dtype(), name, [&]<class T>() {
    run<T, T, UnaryForward<Op>>(name, {{pointer<T>(x)}, {pointer<T>(y)}, {false}, {}}, x.numel(),
                                x.device());
  });
}

template <class Op>
void unary_backward(const char* name, Tensor& dx, const Tensor& dy, const Tensor& x,
                    const Tensor& y, Grad mode) {
  dispatch_device(x.dtype(), name, [&]<class T>() {
    run<T, T, UnaryBackward<Op>>(
        name, {{pointer<T>(dy), pointer<T>(x), pointer<T>(y)}, {pointer<T>(dx)}, {adds(mode)}, {}},
        x.numel(), x.device());
  });
}

template <class Op>
void binary_forward(const char* name, Tensor& y, const Tensor& a, const Tensor& b) {
  dispatch_device(a.dtype(), name, [&]<class T>() {
    run<T, T, BinaryForward<Op>>(name,
                                 {{pointer<T>(a), pointer<T>(b)}, {pointer<T>(y)}, {false}, {}},
                                 a.numel(), a.device());
  });
}

template <class Op>
void binary_backward(const char* name, Tensor& da, Grad mode_a, Tensor& db, Grad mode_b,
                     const Tensor& dy, const Tensor& a, const Tensor& b) {
  dispatch_device(a.dtype(), name, [&]<class T>() {
    run<T, T, BinaryBackward<Op>>(name,
                                  {{pointer<T>(dy), pointer<T>(a), pointer<T>(b)},
                                   {pointer<T>(da), pointer<T>(db)},
                                   {da.defined() && adds(mode_a), db.defined() && adds(mode_b)},
                                   {}},
                                  a.numel(), a.device());
  });
}

void scale_values(const char* name, Tensor& y, const Tensor& x, const Scale& factor, Grad mode) {
  dispatch_device(x.dtype(), name, [&]<class In>() {
    dispatch_device(y.dtype(), name, [&]<class Out>() {
      run<In, Out, Scale>(name, {{pointer<In>(x)}, {pointer<Out>(y)}, {adds(mode)}, factor},
                          x.numel(), x.device());
    });
  });
}

}  // namespace

#define COHORT_DEFINE_UNARY(Op, name)                                                  \
  void name##_forward(Tensor& y, const Tensor& x) {                                    \
    unary_forward<Op>(#name, y, x);                                                    \
  }                                                                                    \
  void name##_backward(Tensor& dx, const Tensor& dy, const Tensor& x, const Tensor& y, \
                       Grad mode) {                                                    \
    unary_backward<Op>(#name "_backward", dx, dy, x, y, mode);                         \
  }
COHORT_UNARY_OPS(COHORT_DEFINE_UNARY)
#undef COHORT_DEFINE_UNARY

#define COHORT_DEFINE_BINARY(Op, name)                                                     \
  void name##_forward(Tensor& y, const Tensor& a, const Tensor& b) {                       \
    binary_forward<Op>(#name, y, a, b);                                                    \
  }                                                                                        \
  void name##_backward(Tensor& da, Grad mode_a, Tensor& db, Grad mode_b, const Tensor& dy, \
                       const Tensor& a, const Tensor& b) {                                 \
    binary_backward<Op>(#name "_backward", da, mode_a, db, mode_b, dy, a, b);              \
  }
COHORT_BINARY_OPS(COHORT_DEFINE_BINARY)
#undef COHORT_DEFINE_BINARY

void scale(Tensor& y, const Tensor& x, double scale, Grad mode) {
  scale_values("scale", y, x, {nullptr, static_cast<float>(scale)}, mode);
}

void scale_by(Tensor& y, const Tensor& x, const Tensor& factor, Grad mode) {
  scale_values("scale_by", y, x, {pointer<float>(factor), 0}, mode);
}

void broadcast_scalar(Tensor& x, const Tensor& value, Grad mode) {
  dispatch_device(x.dtype(), "broadcast_scalar", [&]<class T>() {
    run<T, T, Fill>("broadcast_scalar",
                    {{pointer<T>(x)}, {pointer<T>(x)}, {adds(mode)}, Fill(pointer<float>(value))},
                    x.numel(), x.device());
  });
}

void sum(Tensor& y, const Tensor& x, Grad mode) {
  dispatch_device(x.dtype(), "sum", [&]<class T>() {
    const unsigned blocks = blocks_for(x.numel(), int64_t{kThreads} * kSumPacks * kPackSize<T>);
    Tensor partial = Tensor::empty({blocks}, DType::kF32, x.device());
    const T* in = pointer<T>(x);
    launch("sum", sum_kernel<T>, {blocks, kThreads}, x.device(), in, x.numel(), aligned(in),
           pointer<float>(partial));
    launch("sum_join", join_kernel, {1, kJoinThreads}, x.device(), pointer<float>(partial),
           int64_t{blocks}, pointer<float>(y), adds(mode));
  });
}

}  // namespace cohort::kernels::cuda
