// The two products beside a gated activation on sm_90, each in one kernel with it:
//
//   forward    gate | up = u = x w^T + bias, y = f(u)
//   backward   du = (dy w) f'(u), and y = f(u) once more where it was not kept
//
// Rounded to bf16 are u, y, du and dy w, as by the single ops, whose bits these are. Activations
// that are not gated stay with those ops: beside its product GELU was no faster, since its own
// kernel sums up the gradient of the bias, too (bench/results/h200.md).
#pragma once

#include "kernels/cuda/hopper/product.cuh"
#include "kernels/cuda/hopper/product.h"
#include "kernels/cuda/raw.cuh"

namespace cohort::kernels::cuda {
namespace {

// A matrix of bf16 in shared memory has so many bytes a part. In a buffer lie those of gate, up and
// y.
constexpr int kMatrixBytes = 2 * kPartRows * kPartColumns;
constexpr int kBlocks = kPartColumns / 8;

using Pair = Raw<bf16, 2>;
// A formula of pairs, rounded.
template <class Formula, class... In>
__device__ __forceinline__ uint32_t for_pair(Formula&& formula, In... pairs) {
  return pack_bf16(formula(element(pairs, 0)...), formula(element(pairs, 1)...));
}
template <class Op>
__device__ __forceinline__ uint32_t activate(Pair gate, Pair up) {
  return for_pair([](float g, float v) { return Op::forward(g, v); }, gate, up);
}

template <class Op>
struct ActivationOfSums {
  static constexpr Factor kFactor = Factor::kTwoRows;
  static constexpr int kColumns = 96, kParts = kColumns / kPartColumns;
  static constexpr int kPartBytes = 3 * kMatrixBytes;
  CUtensorMap u, y;
  bool keeps_u;
  const bf16* bias;  // may be null
  int cols;          // of y

  __device__ __forceinline__ void make(int part, const TileSums& sums, uint32_t at,
                                       int column) const {
    const int row = part_row(), first = column + 2 * static_cast<int>(threadIdx.x % 4);
    Pair of_bias[kBlocks][2] = {};
    if (bias != nullptr)
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (first + 8 * n < cols)
            of_bias[n][half] = load_raw<2>(bias + half * cols + first + 8 * n);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t to = at + pair_offset(row + 8 * h, n);
        Pair input[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* const sum = sums[kColumns / 8 * half + kBlocks * part + n] + 2 * h;
          const Pair shift = of_bias[n][half];
          input[half] = {bias == nullptr
                             ? pack_bf16(sum[0], sum[1])
                             : pack_bf16(sum[0] + element(shift, 0), sum[1] + element(shift, 1))};
          if (keeps_u) store_shared(to + half * kMatrixBytes, input[half].word[0]);
        }
        store_shared(to + 2 * kMatrixBytes, activate<Op>(input[0], input[1]));
      }
    }
  }
  __device__ __forceinline__ void begin(uint32_t, int, int, uint32_t ready) const {
    barrier_arrive(ready);
  }
  __device__ __forceinline__ void take(uint32_t at, int row, int column) const {
    for (int half = 0; keeps_u && half < 2; ++half)
      tma_store(&u, {{column, row, half, 0}}, at + half * kMatrixBytes);
    tma_store(&y, {{column, row, 0, 0}}, at + 2 * kMatrixBytes);
  }
};

// Gate and up become their gradients where they are.
template <class Op>
struct ActivationGradient {
  static constexpr Factor kFactor = Factor::kColumns;
  static constexpr int kColumns = 192, kParts = kColumns / kPartColumns;
  static constexpr int kPartBytes = 3 * kMatrixBytes;
  CUtensorMap u, du, y;
  bool wants_y;

  __device__ __forceinline__ void make(int part, const TileSums& sums, uint32_t at, int) const {
    const int row = part_row();
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t to = at + pair_offset(row + 8 * h, n);
        const float* const sum = sums[kBlocks * part + n] + 2 * h;
        const Pair dy{pack_bf16(sum[0], sum[1])};
        Pair u_of[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) u_of[half] = {load_shared(to + half * kMatrixBytes)};
        const auto& [gate, up] = u_of;
        store_shared(
            to, for_pair([](float d, float g, float v) { return d * Op::da(g, v); }, dy, gate, up));
        store_shared(
            to + kMatrixBytes,
            for_pair([](float d, float g, float v) { return d * Op::db(g, v); }, dy, gate, up));
        if (wants_y) store_shared(to + 2 * kMatrixBytes, activate<Op>(gate, up));
      }
  }
  __device__ __forceinline__ void begin(uint32_t at, int row, int column, uint32_t ready) const {
    barrier_arrive_expect(ready, 2 * kMatrixBytes);
    for (int half = 0; half < 2; ++half)
      tma_load(at + half * kMatrixBytes, &u, {{column, row, half, 0}}, ready);
  }
  __device__ __forceinline__ void take(uint32_t at, int row, int column) const {
    for (int half = 0; half < 2; ++half)
      tma_store(&du, {{column, row, half, 0}}, at + half * kMatrixBytes);
    if (wants_y) tma_store(&y, {{column, row, 0, 0}}, at + 2 * kMatrixBytes);
  }
};

// Parts of [rows, cols], or of [rows, 2, cols].
inline CUtensorMap describe_y(const Tensor& t) {
  return describe_matrix(t, 1, kPartRows, kPartColumns);
}
inline CUtensorMap describe_u(const Tensor& t) {
  return describe_matrix(t, 2, kPartRows, kPartColumns);
}

}  // namespace

template <class Op>
void product_activation(const LinearActivation& args) {
  const bool keeps_u = args.u.defined();
  run_product(
      "linear_activation", args.x, args.w, args.y.cols(),
      ActivationOfSums<Op>{keeps_u ? describe_u(args.u) : CUtensorMap{}, describe_y(args.y),
                           keeps_u, pointer<bf16>(args.bias), static_cast<int>(args.y.cols())});
}

template <class Op>
void product_activation_backward(const LinearActivationBackward& args) {
  const bool wants_y = args.y.defined();
  run_product("linear_activation_backward", args.dy, args.w, args.w.cols(),
              ActivationGradient<Op>{describe_u(args.u), describe_u(args.du),
                                     wants_y ? describe_y(args.y) : CUtensorMap{}, wants_y});
}

}  // namespace cohort::kernels::cuda
