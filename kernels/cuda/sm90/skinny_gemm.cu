// Skinny GEMMs of weights in bf16, which one thread loads by TMA.
#include "kernels/cuda/sm90/skinny_gemm.h"

#include "kernels/cuda/sm90/skinny_gemm.cuh"

namespace cohort::kernels::cuda {

struct TmaWeights {
  static constexpr int kBlocksPerSm = 0;  // as many as fit
  CUtensorMap map;

  static constexpr int warps(int) { return 1; }
  static constexpr int arrivals(int) { return 1; }
  static constexpr int source_bytes(int) { return 0; }

  template <class T>
  __device__ void write(const OperandStages<T>& stages, const SkinnySizes& size, int) const {
    if (threadIdx.x % 32 != 0) return;
    load_operand(stages, size, size.may_prefetch_w ? INT_MAX : 0, 0, T::kBytesW,
                 [&](uint32_t stage, int tile, int step, uint32_t barrier) {
                   tma_load(stage, &map, {0, T::first_row(size, tile), 0, 2 * step}, barrier);
                 });
  }
};

namespace {

template <class Out, int... kSizes>
using Tiling = SkinnyTiling<Out, TmaWeights, kSizes...>;

// `op` is used if T has two parts.
template <class T>
void run(const SkinnyGemm& args, Activation op = {}) {
  run_skinny<T>(args, {operand_tensor_map(args.w, T::kParts, T::kPartRows)}, op);
}

// Thresholds for the rows of w, measured on an H200 (132 multiprocessors): up to kFew, tiles of 16
// give every multiprocessor at most one tile; from kMany on, tiles of 80 suffice to occupy all, and
// x is loaded by fewer blocks.
constexpr int64_t kFew = 132 * 16, kMany = 132 * 40;

// True if faster than cuBLASLt, which is not the case if two tiles of tokens share a multiprocessor
// with long k, nor between the two thresholds.
bool is_faster(const GemmSize& size) {
  const auto& [m, n, k] = size;
  if (n > kFew && n < kMany) return m <= 16;
  return m <= 32 || n <= kFew / 2 || n >= kMany || k <= 4096;
}

// If one block per multiprocessor covers all tiles, the stages fill its shared memory, so that the
// early-launched blocks of the next GEMM do not crowd on a few multiprocessors.
template <class Out>
void dispatch(const SkinnyGemm& args) {
  const int64_t m = args.x.rows(), n = args.w.rows();
  if (n <= kFew) {
    if (m <= 16) return run<Tiling<Out, 16, 16, 16, 8, 14>>(args);
    if (m <= 32 || n <= kFew / 2) return run<Tiling<Out, 32, 16, 16, 16, 10>>(args);
    return run<Tiling<Out, 32, 16, 16, 16, 8>>(args);
  }
  if (n < kMany) return run<Tiling<Out, 16, 40, 16, 8, 8>>(args);
  if (m <= 16) return run<Tiling<Out, 16, 80, 16, 16, 5>>(args);
  if (m <= 32) return run<Tiling<Out, 32, 80, 32, 16, 4>>(args);
  return run<Tiling<Out, 64, 80, 32, 40, 4>>(args);
}

}  // namespace

bool is_skinny(const GemmSize& size, Device device) {
  const auto& [m, n, k] = size;
  return m > 0 && m <= kSkinnyRows && k > 0 && k % kBox == 0 && n % 8 == 0 &&
         std::max(n, k) < (int64_t{1} << 30) && is_faster(size) &&
         ::cohort::cuda::fits(
             reinterpret_cast<const void*>(skinny_kernel<Tiling<bf16, 16, 16, 16, 8, 14>>),
             {.shared_memory = kSharedPerSm, .compute_capability = 90}, device);
}

void skinny_gemm(const SkinnyGemm& args) {
  COHORT_CHECK(is_skinny({args.x.rows(), args.w.rows(), args.x.cols()}, args.x.device()),
               "[skinny_gemm] unsupported sizes: ", args.x.str(), " times ", args.w.str());
  if (args.y.dtype() == DType::kF32)
    dispatch<float>(args);
  else
    dispatch<bf16>(args);
}

bool is_gated_skinny(const GemmSize& size, Device device) {
  return size.n >= kMany && is_skinny(size, device);
}

void gated_skinny_gemm(const SkinnyGemm& args, Activation op) {
  const int64_t m = args.x.rows();
  COHORT_CHECK(is_gated_skinny({m, args.w.rows(), args.x.cols()}, args.x.device()),
               "[skinny_gemm] unsupported sizes: ", args.x.str(), " times ", args.w.str(),
               " gated");
  if (m <= 16) return run<Tiling<bf16, 16, 80, 16, 16, 5, 2>>(args, op);
  if (m <= 32) return run<Tiling<bf16, 32, 80, 32, 16, 4, 2>>(args, op);
  // With few rows of w per warp, reading x would exceed the shared memory bandwidth: two warps have
  // 24 rows of each part and two have 16 (with 8 unused).
  run<Tiling<bf16, 64, 80, 32, 48, 4, 2>>(args, op);
}

}  // namespace cohort::kernels::cuda
