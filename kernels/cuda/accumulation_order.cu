// A warp computes 16 x 8 outputs as one chain of mma.m16n8k16 and compares them with c. Without
// shared memory or pipelining: this is the specification.
#include "kernels/cuda/accumulation_order.h"

#include "core/rng.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"

namespace cohort::kernels::cuda {
namespace {

// Strided view of a matrix, with zeros outside its bounds.
struct Matrix {
  const bf16* data;
  int64_t rows, cols, row_stride, col_stride;

  // Operand register with the bits of (row, col) and (row, col + 1), or (row + 1, col) if `below`.
  __device__ uint32_t pair(int64_t row, int64_t col, int below) const {
    const auto bits = [&](int64_t r, int64_t c) -> uint32_t {
      return r < rows && c < cols ? __bfloat16_as_ushort(data[r * row_stride + c * col_stride]) : 0;
    };
    return bits(row, col) | bits(row + below, col + 1 - below) << 16;
  }
};

template <class Out>
__global__ void __launch_bounds__(32)
    out_of_order_kernel(int32_t* differing, const Out* c, Matrix a, Matrix b, const bf16* bias) {
  const int lane = threadIdx.x, group = lane / 4, quad = lane % 4;
  const int64_t m = int64_t{blockIdx.y} * 16 + group, n = int64_t{blockIdx.x} * 8;
  float accumulators[4] = {};
  for (int64_t k = 2 * quad; k - 2 * quad < a.cols; k += 16) {
    const uint32_t x[4] = {a.pair(m, k, 0), a.pair(m + 8, k, 0), a.pair(m, k + 8, 0),
                           a.pair(m + 8, k + 8, 0)};
    mma_bf16(accumulators, x, b.pair(k, n + group, 1), b.pair(k + 8, n + group, 1));
  }
  int wrong = 0;
  for (int i = 0; i < 4; ++i) {
    const int64_t row = m + i / 2 * 8, col = n + 2 * quad + i % 2;
    if (row >= a.rows || col >= b.cols) continue;
    const Out expected =
        from_float<Out>(bias != nullptr ? accumulators[i] + to_float(bias[col]) : accumulators[i]);
    // The conversion to f32 is exact and injective.
    wrong +=
        __float_as_uint(to_float(expected)) != __float_as_uint(to_float(c[row * b.cols + col]));
  }
  if (wrong > 0) atomicAdd(differing, wrong);
}

__global__ void fill_kernel(bf16* out, int64_t count, uint64_t seed, uint64_t stream) {
  const int64_t at = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 4;
  const auto words = philox(seed, stream, static_cast<uint64_t>(at));
  for (int i = 0; i < 4; ++i)
    if (at + i < count)
      out[at + i] = __float2bfloat16_rn(2 * uniform_f32(words[static_cast<size_t>(i)]) - 1);
}

Matrix view(const Tensor& t, Transpose transpose) {
  const auto* data = pointer<bf16>(t);
  const int64_t stride = RowOffsets(t).outer;
  if (transpose == Transpose::kYes) return {data, t.cols(), t.rows(), 1, stride};
  return {data, t.rows(), t.cols(), stride, 1};
}

}  // namespace

void count_out_of_order(const AccumulationOrderCheck& args) {
  const Matrix a = view(args.a, args.transpose_a), b = view(args.b, args.transpose_b);
  dispatch_device(args.c.dtype(), "accumulation_order", [&]<class Out>() {
    launch("out_of_order", out_of_order_kernel<Out>,
           {dim3(blocks_for(b.cols, 8), blocks_for(a.rows, 16)), 32}, args.c.device(),
           pointer<int32_t>(args.differing), pointer<Out>(args.c), a, b, pointer<bf16>(args.bias));
  });
}

void fill_for_comparison(Tensor& t, uint64_t seed) {
  launch("fill_for_comparison", fill_kernel, {blocks_for(t.numel(), 4 * 256), 256}, t.device(),
         pointer<bf16>(t), t.numel(), seed, rng_stream(kComparisonPurpose));
}

}  // namespace cohort::kernels::cuda
