// Elementwise ops on CUDA: one kernel, specialised by functors with the formulas of elementwise.h.
// A thread loads several 16-byte packs before it computes and stores, so that enough loads are in
// flight to saturate the memory.
#include "kernels/cuda/raw.cuh"
#include "kernels/elementwise.h"

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
  uint32_t half = 0;  // gated ops: length of half a row

  // Registers of one pack: N elements of each input, and of each accumulated output's old values.
  template <int N>
  struct Values {
    Raw<In, N> in[kIn];
    Raw<Out, N> old[kOut];
  };
  // Offset of element i in tensor k, which is a half of rows of 2 `half` elements if bit k of kWide
  // is set. A pack never spans rows.
  template <unsigned kWide>
  __device__ __forceinline__ int64_t at(int k, int64_t i) const {
    if ((kWide >> k & 1) == 0) return i;
    // A 64-bit division is several times slower and rarely needed.
    const int64_t row = i <= 0xffffffffll ? static_cast<uint32_t>(i) / half : i / half;
    return i + row * half;
  }
  // Loads only, so that a caller can issue the loads of several packs before any arithmetic.
  template <int N>
  __device__ __forceinline__ void load(int64_t i, Values<N>& values) const {
#pragma unroll
    for (int k = 0; k < kIn; ++k) values.in[k] = load_raw<N>(in[k] + at<Fn::kWideIn>(k, i));
    if constexpr (Fn::kAccumulates) {
#pragma unroll
      for (int k = 0; k < kOut; ++k)
        if (accumulate[k]) values.old[k] = load_raw<N>(out[k] + at<Fn::kWideOut>(k, i));
    }
  }
  // Applies the formula to N elements in f32, then stores each output vectorized. A bf16 result is
  // rounded once, after the old value is added.
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
      store_raw(out[k] + at<Fn::kWideOut>(k, i), to_raw<Out>(result[k]));
    }
  }
};

// Processes the first `packs` packs of N elements by vectorized accesses, the rest of n one by one.
template <int N, int kUnroll, class Loop>
__global__ void __launch_bounds__(kThreads, 4)
    elementwise_kernel(Loop loop, int64_t n, int64_t packs) {
  launch_dependents_and_wait();
  // A thread has kUnroll packs, kThreads apart: adjacent threads have adjacent packs, and all loads
  // are in flight before the first result is computed.
  loop.fn.begin();
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kUnroll) + threadIdx.x;
  // Two separate loops, so that no store is between two loads.
  typename Loop::template Values<N> values[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u)
    if (first + u * kThreads < packs) loop.template load<N>((first + u * kThreads) * N, values[u]);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u)
    if (first + u * kThreads < packs) loop.template store<N>((first + u * kThreads) * N, values[u]);

  // The remainder: less than a pack, or everything if a pointer is not aligned.
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = packs * N + int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += step) {
    typename Loop::template Values<1> value;
    loop.template load<1>(i, value);
    loop.template store<1>(i, value);
  }
}

template <class In, class Out, class Fn>
void run(const char* name, const Loop<In, Out, Fn>& loop, int64_t n, Device device) {
  // kWidth: elements per pack, 16 bytes of the larger type. kUnroll: packs per thread, fewer for
  // more tensors, so that the registers suffice for four blocks per multiprocessor.
  constexpr int kWidth = kPackSize<std::conditional_t<(sizeof(In) > sizeof(Out)), In, Out>>;
  constexpr int kTensors = Fn::kIn + Fn::kOut, kUnroll = kTensors <= 2 ? 4 : kTensors < 6 ? 2 : 1;
  bool vectorized = true;
  for (const In* p : loop.in) vectorized &= aligned(p);
  for (const Out* p : loop.out) vectorized &= aligned(p);
  // Both halves of a row start at pack boundaries.
  if (loop.half > 0) vectorized &= loop.half % kWidth == 0;
  const int64_t packs = vectorized ? n / kWidth : 0;
  launch(name, elementwise_kernel<kWidth, kUnroll, Loop<In, Out, Fn>>,
         {.grid = blocks_for(n, int64_t{kThreads} * kUnroll * kWidth),
          .block = kThreads,
          .start = Start::kProgrammatic},
         device, loop, n, packs);
}

// Base of the per-element formulas in f32. begin() runs once per thread. The masks have a bit for
// each input and output that is a half of the rows of a tensor twice as wide.
template <int kInputs, int kOutputs, Grad kMode, unsigned kInMask = 0, unsigned kOutMask = 0>
struct Formula {
  static constexpr int kIn = kInputs, kOut = kOutputs;
  static constexpr bool kAccumulates = kMode == Grad::kAccumulate;
  static constexpr unsigned kWideIn = kInMask, kWideOut = kOutMask;
  __device__ void begin() {}
};
template <class Op>
struct UnaryValue : Formula<1, 1, Grad::kOverwrite> {
  __device__ void operator()(const float (&x)[1], float (&y)[1]) const { y[0] = Op::forward(x[0]); }
};
template <class Op>
struct UnaryGradient : Formula<3, 1, Grad::kAccumulate> {  // in: dy, x, y
  __device__ void operator()(const float (&in)[3], float (&dx)[1]) const {
    dx[0] = in[0] * Op::derivative(in[1], in[2]);
  }
};
template <class Op>
struct BinaryValue : Formula<2, 1, Grad::kOverwrite> {
  __device__ void operator()(const float (&in)[2], float (&y)[1]) const {
    y[0] = Op::forward(in[0], in[1]);
  }
};
template <class Op>
struct BinaryGradients : Formula<3, 2, Grad::kAccumulate> {  // in: dy, a, b
  __device__ void operator()(const float (&in)[3], float (&d)[2]) const {
    d[0] = in[0] * Op::da(in[1], in[2]);
    d[1] = in[0] * Op::db(in[1], in[2]);
  }
};
template <class Op>
struct GatedValue : BinaryValue<Op> {
  static constexpr unsigned kWideIn = 0b11;
};
template <class Op>
struct GatedGradients : BinaryGradients<Op> {  // in: dy, gate, up
  static constexpr unsigned kWideIn = 0b110, kWideOut = 0b11;
};
template <class Op>
struct GatedGradientsAndValue : Formula<3, 3, Grad::kAccumulate, 0b110, 0b011> {
  // in: dy, gate, up
  __device__ void operator()(const float (&in)[3], float (&out)[3]) const {
    out[0] = in[0] * Op::da(in[1], in[2]);
    out[1] = in[0] * Op::db(in[1], in[2]);
    out[2] = Op::forward(in[1], in[2]);
  }
};
// y = factor x; the factor is read from device memory if `source` is given.
struct ScaleFormula : Formula<1, 1, Grad::kAccumulate> {
  const float* source;
  float factor;
  ScaleFormula(const float* source, float factor) : source(source), factor(factor) {}
  __device__ void begin() {
    if (source != nullptr) factor = *source;
  }
  __device__ void operator()(const float (&x)[1], float (&y)[1]) const { y[0] = factor * x[0]; }
};

// y = *source. The input is unused, so its load is eliminated.
struct Fill : Formula<1, 1, Grad::kAccumulate> {
  const float* source;
  float value = 0;
  explicit Fill(const float* source) : source(source) {}
  __device__ void begin() { value = *source; }
  __device__ void operator()(const float (&)[1], float (&y)[1]) const { y[0] = value; }
};

// Sum: a block adds kSumPacks packs per thread in an order that depends on n only; one block then
// adds the partial sums in f64.
constexpr int kSumPacks = 16, kPartialThreads = 1024;

// The thread's packs are kThreads packs apart, so that a warp reads 512 contiguous bytes; eight are
// in flight at a time. kWhole: all packs of the block are inside and aligned.
template <class T, bool kWhole>
__device__ __forceinline__ float thread_sum(const T* x, int64_t n) {
  constexpr int N = kPackSize<T>;
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kSumPacks) + threadIdx.x;
  float sum = 0;
#pragma unroll 8
  for (int k = 0; k < kSumPacks; ++k) {
    const int64_t i = (first + k * kThreads) * N, remaining = n - i;
    Raw<T, N> raw;
    if constexpr (kWhole)
      raw = load_raw<N>(x + i);
    else
      raw = load_some<N>(x + i, remaining < N ? static_cast<int>(remaining) : N);
#pragma unroll
    for (int j = 0; j < N; ++j) sum += element(raw, j);
  }
  return sum;
}

// partial[b] = sum of elements [b, b + 1) kThreads kSumPacks N of x: each thread adds its packs in
// f32 in ascending order, then block_reduce() adds the threads.
template <class T>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const T* x, int64_t n, bool vectorized, float* partial) {
  __shared__ float scratch[kThreads / 32];
  constexpr int64_t kBlock = int64_t{kThreads} * kSumPacks * kPackSize<T>;
  // The last block, and every block if x is not aligned, loads elements one by one, zeros past n.
  const bool whole = vectorized && (int64_t{blockIdx.x} + 1) * kBlock <= n;
  const float thread_total = whole ? thread_sum<T, true>(x, n) : thread_sum<T, false>(x, n);
  const float total = block_reduce<kThreads>(thread_total, scratch, Plus{});
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// One block: thread i adds partial sums i, i + kPartialThreads, ..., then the threads' totals are
// reduced in a fixed order; y is written or accumulated once.
__global__ void __launch_bounds__(kPartialThreads)
    sum_partials_kernel(const float* partial, int64_t n, float* y, bool accumulate) {
  __shared__ double scratch[kPartialThreads / 32];
  // Few partial sums: one per 64 KiB of f32 x.
  double thread_total = 0;
  for (int64_t i = threadIdx.x; i < n; i += kPartialThreads)
    thread_total += static_cast<double>(partial[i]);
  const double total = block_reduce<kPartialThreads>(thread_total, scratch, Plus{});
  if (threadIdx.x == 0)
    *y = static_cast<float>(accumulate ? static_cast<double>(*y) + total : total);
}

bool adds(Grad mode) {
  return mode == Grad::kAccumulate;
}
bool adds(const GradOut& grad) {
  return grad.wanted() && adds(grad.mode);
}

// Applies a formula to tensors of one shape and dtype.
template <class Fn>
void apply(const char* name, const Tensor* const (&in)[Fn::kIn], const GradOut (&out)[Fn::kOut],
           const Fn& fn = {}) {
  dispatch_device(in[0]->dtype(), name, [&]<class T>() {
    Loop<T, T, Fn> loop{.in = {}, .out = {}, .accumulate = {}, .fn = fn};
    for (int k = 0; k < Fn::kIn; ++k) loop.in[k] = pointer<T>(*in[k]);
    for (int k = 0; k < Fn::kOut; ++k) {
      loop.out[k] = pointer<T>(out[k].tensor);
      loop.accumulate[k] = adds(out[k]);
    }
    run(name, loop, in[0]->numel(), in[0]->device());
  });
}

template <class Op>
void forward(const UnaryForward& args, const char* name) {
  apply<UnaryValue<Op>>(name, {&args.x}, {{args.y}});
}
template <class Op>
void backward(const UnaryBackward& args, const char* name) {
  apply<UnaryGradient<Op>>(name, {&args.dy, &args.x, &args.y}, {args.dx});
}
template <class Op>
void forward(const BinaryForward& args, const char* name) {
  apply<BinaryValue<Op>>(name, {&args.a, &args.b}, {{args.y}});
}
template <class Op>
void backward(const BinaryBackward& args, const char* name) {
  apply<BinaryGradients<Op>>(name, {&args.dy, &args.a, &args.b}, {args.da, args.db});
}

// Loop::half of a gated op: the row length of y.
uint32_t gated_half(const Tensor& rows, const char* name) {
  COHORT_CHECK(rows.cols() < (1 << 30), "[", name, "] rows of ", rows.str(), " are too long");
  return static_cast<uint32_t>(rows.cols());
}

template <class Op>
void forward(const GatedForward& args, const char* name) {
  const uint32_t half = gated_half(args.y, name);
  dispatch_device(args.x.dtype(), name, [&]<class T>() {
    const T* x = pointer<T>(args.x);
    run<T, T, GatedValue<Op>>(name, {{x, x + half}, {pointer<T>(args.y)}, {false}, {}, half},
                              args.y.numel(), args.x.device());
  });
}

template <class Op>
void backward(const GatedBackward& args, const char* name) {
  const uint32_t half = gated_half(args.dy, name);
  const bool accumulates = adds(args.dx);
  dispatch_device(args.x.dtype(), name, [&]<class T>() {
    const T *x = pointer<T>(args.x), *dy = pointer<T>(args.dy);
    T* dx = pointer<T>(args.dx.tensor);
    Tensor y = args.y;
    const int64_t count = args.dy.numel();
    if (args.y.defined())
      run<T, T, GatedGradientsAndValue<Op>>(name,
                                            {{dy, x, x + half},
                                             {dx, dx + half, pointer<T>(y)},
                                             {accumulates, accumulates, false},
                                             {},
                                             half},
                                            count, args.x.device());
    else
      run<T, T, GatedGradients<Op>>(
          name, {{dy, x, x + half}, {dx, dx + half}, {accumulates, accumulates}, {}, half}, count,
          args.x.device());
  });
}

void scale_values(const char* name, Tensor& y, const Tensor& x, const ScaleFormula& formula,
                  Grad mode) {
  dispatch_device(x.dtype(), name, [&]<class In>() {
    dispatch_device(y.dtype(), name, [&]<class Out>() {
      run<In, Out, ScaleFormula>(name, {{pointer<In>(x)}, {pointer<Out>(y)}, {adds(mode)}, formula},
                                 x.numel(), x.device());
    });
  });
}

}  // namespace

#define COHORT_DEFINE(Op, name)                        \
  void name##_forward(const Op::ForwardArgs& args) {   \
    forward<Op>(args, #name);                          \
  }                                                    \
  void name##_backward(const Op::BackwardArgs& args) { \
    backward<Op>(args, #name "_backward");             \
  }
COHORT_ELEMENTWISE_OPS(COHORT_DEFINE)
#undef COHORT_DEFINE

void scale(const Scale& args) {
  scale_values("scale", args.y, args.x, {nullptr, static_cast<float>(args.factor)}, args.mode);
}

void scale_by(const ScaleBy& args) {
  scale_values("scale_by", args.y, args.x, {pointer<float>(args.factor), 0}, args.mode);
}

void broadcast_scalar(const BroadcastScalar& args) {
  apply("broadcast_scalar", {&args.x}, {{args.x, args.mode}}, Fill(pointer<float>(args.value)));
}

void sum(const Sum& args) {
  dispatch_device(args.x.dtype(), "sum", [&]<class T>() {
    const int64_t n = args.x.numel();
    const Device device = args.x.device();
    const unsigned blocks = blocks_for(n, int64_t{kThreads} * kSumPacks * kPackSize<T>);
    Tensor partial = Tensor::empty({blocks}, DType::kF32, device);
    const T* in = pointer<T>(args.x);
    launch("sum", sum_kernel<T>, {blocks, kThreads}, device, in, n, aligned(in),
           pointer<float>(partial));
    launch("sum_partials", sum_partials_kernel, {1, kPartialThreads}, device,
           pointer<float>(partial), int64_t{blocks}, pointer<float>(args.y), adds(args.mode));
  });
}

}  // namespace cohort::kernels::cuda
