// The two GEMMs of a gated activation on sm_90, each fused with it:
//
//   forward    gate | up = u = x w^T + bias, y = f(u)
//   backward   du = (dy w) f'(u), and y = f(u) again if it was not kept
//
// u, y, du and dy w are rounded to bf16, so the results are bitwise those of the separate ops. With
// an adapter behind the activation the backward has dy w + dh a instead of dy w: one sum and one
// rounding. Other activations use the separate ops: fusing GELU was no faster, because its own
// kernel also computes the gradient of the bias (bench/results/h200.md).
#include "kernels/activation.h"
#include "kernels/cuda/accumulation_order.h"
#include "kernels/cuda/raw.cuh"
#include "kernels/cuda/sm90/gemm.cuh"
#include "kernels/cuda/sm90/skinny_gemm.h"

namespace cohort::kernels::cuda {
namespace {

// Bytes of a bf16 subtile of one matrix. A buffer holds those of gate, up and y.
constexpr int kMatrixBytes = 2 * kSubtileRows * kSubtileColumns;
constexpr int kBlocks = kSubtileColumns / 8;

using Pair = Raw<bf16, 2>;
// Applies the formula to both elements and rounds to bf16.
template <class Formula, class... In>
__device__ __forceinline__ uint32_t map_pair(Formula&& formula, In... pairs) {
  return pack_bf16(formula(element(pairs, 0)...), formula(element(pairs, 1)...));
}
template <class Op>
__device__ __forceinline__ uint32_t activate(Pair gate, Pair up) {
  return map_pair([](float g, float v) { return Op::forward(g, v); }, gate, up);
}

template <class Op>
struct GatedActivationEpilogue {
  using Mainloop = GemmMainloop<bf16, 192, OperandB::kStackedKMajor, 4>;
  static constexpr int kSubtileBytes = 3 * kMatrixBytes, kBuffers = 2;
  CUtensorMap u, y;
  bool stores_u;
  const bf16* bias;  // may be null
  int y_cols;

  __device__ __forceinline__ void compute(int subtile, const Mainloop::Accumulators& accumulators,
                                          uint32_t buffer, int column) const {
    const int row = subtile_row(), first = column + 2 * static_cast<int>(threadIdx.x % 4);
    Pair bias_pair[kBlocks][2] = {};
    if (bias != nullptr)
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (first + 8 * n < y_cols)
            bias_pair[n][half] = load_raw<2>(bias + half * y_cols + first + 8 * n);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t to = buffer + pair_offset(row + 8 * h, n);
        Pair input[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* const acc =
              accumulators[Mainloop::kTileColumns / 8 * half + kBlocks * subtile + n] + 2 * h;
          const Pair shift = bias_pair[n][half];
          input[half] = {bias == nullptr
                             ? pack_bf16(acc[0], acc[1])
                             : pack_bf16(acc[0] + element(shift, 0), acc[1] + element(shift, 1))};
          if (stores_u) store_shared(to + half * kMatrixBytes, input[half].word[0]);
        }
        store_shared(to + 2 * kMatrixBytes, activate<Op>(input[0], input[1]));
      }
    }
  }
  __device__ __forceinline__ void load(uint32_t, int, int, uint32_t full) const {
    barrier_arrive(full);
  }
  __device__ __forceinline__ void store(uint32_t buffer, int row, int column) const {
    for (int half = 0; stores_u && half < 2; ++half)
      tma_store(&u, {{column, row, half, 0}}, buffer + half * kMatrixBytes);
    tma_store(&y, {{column, row, 0, 0}}, buffer + 2 * kMatrixBytes);
  }
};

// Overwrites gate and up with their gradients in the buffer.
template <class Op>
struct GatedActivationGradientEpilogue {
  // The subtiles' inputs come from memory: more buffers hide its latency.
  using Mainloop = GemmMainloop<bf16, 192, OperandB::kMnMajor, 3>;
  static constexpr int kSubtileBytes = 3 * kMatrixBytes, kBuffers = 4;
  CUtensorMap u, du, y;
  bool stores_y;

  __device__ __forceinline__ void compute(int subtile, const Mainloop::Accumulators& accumulators,
                                          uint32_t buffer, int) const {
    const int row = subtile_row();
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t to = buffer + pair_offset(row + 8 * h, n);
        const float* const acc = accumulators[kBlocks * subtile + n] + 2 * h;
        const Pair dy{pack_bf16(acc[0], acc[1])};
        Pair u_pair[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) u_pair[half] = {load_shared(to + half * kMatrixBytes)};
        const auto& [gate, up] = u_pair;
        store_shared(
            to, map_pair([](float d, float g, float v) { return d * Op::da(g, v); }, dy, gate, up));
        store_shared(
            to + kMatrixBytes,
            map_pair([](float d, float g, float v) { return d * Op::db(g, v); }, dy, gate, up));
        if (stores_y) store_shared(to + 2 * kMatrixBytes, activate<Op>(gate, up));
      }
  }
  __device__ __forceinline__ void load(uint32_t buffer, int row, int column, uint32_t full) const {
    barrier_arrive_expect_tx(full, 2 * kMatrixBytes);
    for (int half = 0; half < 2; ++half)
      tma_load(buffer + half * kMatrixBytes, &u, {{column, row, half, 0}}, full);
  }
  __device__ __forceinline__ void store(uint32_t buffer, int row, int column) const {
    for (int half = 0; half < 2; ++half)
      tma_store(&du, {{column, row, half, 0}}, buffer + half * kMatrixBytes);
    if (stores_y) tma_store(&y, {{column, row, 0, 0}}, buffer + 2 * kMatrixBytes);
  }
};

// Tensor maps with subtile boxes of [rows, cols] and [rows, 2, cols].
inline CUtensorMap y_tensor_map(const Tensor& t) {
  return matrix_tensor_map(t, 1, kSubtileRows, kSubtileColumns);
}
inline CUtensorMap u_tensor_map(const Tensor& t) {
  return matrix_tensor_map(t, 2, kSubtileRows, kSubtileColumns);
}

// True if all defined tensors are bf16 matrices, perhaps columns of wider ones, and their rows are
// aligned to 16 bytes.
template <class... Tensors>
bool has_aligned_bf16_rows(const Tensors&... tensors) {
  const auto fits = [](const Tensor& t) {
    return !t.defined() ||
           (t.dtype() == DType::kBF16 && t.cols() % kPackSize<bf16> == 0 &&
            RowOffsets(t).outer % kPackSize<bf16> == 0 && (t.rank() == 2 || t.is_contiguous()) &&
            aligned(static_cast<const char*>(t.raw())));
  };
  return (fits(tensors) && ...);
}

// True if sm90/gemm.cuh suits a GEMM of [rows, k] and [k, cols]: its 128 x 192 tiles must occupy
// at least 60 % of the multiprocessors, averaged over all waves.
bool has_enough_tiles(int64_t rows, int64_t cols, int64_t k, Device device) {
  if (std::min({rows, cols, k}) == 0 || std::max({rows, cols, k}) >= 1 << 30 ||
      !fits(kSm90a, ::cohort::cuda::gpu_properties(device)))
    return false;
  const int64_t tiles = (rows + 127) / 128 * ((cols + 191) / 192);
  const int64_t blocks = ::cohort::cuda::gpu_properties(device).multiprocessors;
  return 10 * tiles >= 6 * ((tiles + blocks - 1) / blocks * blocks);
}

// Calls fn.operator()<Op>() for a gated op; returns false for others.
template <class F>
bool for_gated_op(Activation op, F&& fn) {
  switch (op) {
#define COHORT_CASE(Op, name)     \
  case Activation::k##Op:         \
    fn.template operator()<Op>(); \
    return true;
    COHORT_GATED_OPS(COHORT_CASE)
#undef COHORT_CASE
    default:
      return false;
  }
}

}  // namespace

bool fused_linear_activation(const LinearActivation& args) {
  const auto& [y, x, w, bias, op, u, tail] = args;
  const Device device = x.device();
  check_tail(x, tail);
  if (!is_gated(op) || !has_aligned_bf16_rows(x, w, bias)) return false;
  // Measured with 896 channels. Above this limit the saved pass costs less than 1/15 of the GEMM.
  constexpr int64_t kMaxChannels = 4096;
  const bool has_paired_rows =  // bf16 pairs of y are aligned
      RowOffsets(y).outer % 2 == 0 && (y.rank() == 2 || y.is_contiguous());
  const bool use_skinny = !u.defined() && has_paired_rows &&
                          aligned(static_cast<const char*>(y.raw())) &&
                          is_gated_skinny({x.rows(), w.rows(), x.cols()}, device);
  const bool use_gemm = has_aligned_bf16_rows(y, u) && x.cols() - tail <= kMaxChannels &&
                        has_enough_tiles(x.rows(), w.rows(), x.cols(), device);
  if ((!use_skinny && !use_gemm) || !linear_accumulates_in_order(x, w, bias)) return false;
  if (use_skinny) {
    gated_skinny_gemm({.y = y, .x = x, .w = w, .bias = bias, .tail = tail}, op);
    return true;
  }
  return for_gated_op(op, [&]<class Op>() {
    launch_gemm("linear_activation", {args.x, args.w, args.tail}, {{}, {}}, args.y.cols(),
                GatedActivationEpilogue<Op>{
                    args.u.defined() ? u_tensor_map(args.u) : CUtensorMap{}, y_tensor_map(args.y),
                    args.u.defined(), pointer<bf16>(args.bias), static_cast<int>(args.y.cols())});
  });
}

bool fused_linear_activation_backward(const LinearActivationBackward& args) {
  const auto& [du, dbias, dy, w, u, op, y, dh, a] = args;
  if (!has_aligned_bf16_rows(dy, w, u, du, y, dh, a) ||
      !has_enough_tiles(dy.rows(), w.cols(), dy.cols(), dy.device()))
    return false;
  return for_gated_op(op, [&]<class Op>() {
    const bool stores_y = args.y.defined();
    launch_gemm("linear_activation_backward", {args.dy, args.w}, {args.dh, args.a}, args.w.cols(),
                GatedActivationGradientEpilogue<Op>{u_tensor_map(args.u), u_tensor_map(args.du),
                                                    stores_y ? y_tensor_map(args.y) : CUtensorMap{},
                                                    stores_y});
  });
}

}  // namespace cohort::kernels::cuda
