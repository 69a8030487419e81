// AdamW and the gradient norm over many tensors at once: all tensors are split into fixed blocks,
// and one parallel loop runs over the blocks of all of them.
#include "kernels/optimizer.h"

#include <array>
#include <atomic>
#include <cmath>
#include <vector>

#include "core/parallel.h"
#include "kernels/adamw.h"
#include "kernels/cpu/reduce.h"
#include "kernels/vector_math.h"

namespace cohort::kernels::cpu {
namespace {

struct Block {
  size_t tensor;
  int64_t begin, end;
};

// Blocks of tensors tensor(0), ..., tensor(count - 1).
template <class F>
std::vector<Block> split_into_blocks(size_t count, F&& tensor) {
  std::vector<Block> blocks;
  for (size_t i = 0; i < count; ++i) {
    const int64_t n = tensor(i).numel();
    for (int64_t begin = 0; begin < n; begin += kElementGrain)
      blocks.push_back({i, begin, std::min(n, begin + kElementGrain)});
  }
  return blocks;
}

template <class F>
void for_blocks(const std::vector<Block>& blocks, F&& fn) {
  parallel_for(static_cast<int64_t>(blocks.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) fn(static_cast<size_t>(b));
  });
}

// Updates elements [begin, end); returns true if all of them are finite.
template <class T>
bool update(AdamWTensor& tensor, const AdamWDesc& desc, T grad_scale, int64_t begin, int64_t end) {
  const auto factors = adamw_factors<T>(desc);
  const auto decay = adamw_decay<T>(desc, tensor.weight_decay);
  T *p = tensor.param.data<T>(), *m = tensor.m.data<T>(), *v = tensor.v.data<T>();
  const T* grad = tensor.grad.data<T>();
  COHORT_VECTORIZE
  for (int64_t i = begin; i < end; ++i)
    adamw_element(p[i], m[i], v[i], grad[i] * grad_scale, decay, factors);
  // x - x is 0 if x is finite, and else NaN.
  const T zero = lane_sum<T>(end - begin, [&](int64_t i) {
    const int64_t k = begin + i;
    return (p[k] - p[k]) + (m[k] - m[k]) + (v[k] - v[k]);
  });
  return zero == 0;
}

// Variant for bf16 moments.
bool update_bf16_moments(AdamWTensor& tensor, const AdamWDesc& desc, float grad_scale,
                         int64_t begin, int64_t end) {
  const auto factors = adamw_factors<float>(desc);
  const auto decay = adamw_decay<float>(desc, tensor.weight_decay);
  const uint64_t stream = moments_stream(desc, tensor.unit);
  auto* p = tensor.param.data<float>();
  auto* m_bits = static_cast<uint16_t*>(tensor.m.raw());
  auto* v_bits = static_cast<uint16_t*>(tensor.v.raw());
  const float* grad = tensor.grad.data<float>();
  std::array<uint32_t, 4> random = {};
  bool finite = true;
  for (int64_t i = begin; i < end; ++i) {
    const auto flat = static_cast<uint64_t>(tensor.flat_index + i);
    if (i == begin || flat % 4 == 0) random = philox(desc.seed, stream, flat / 4);
    float m = bf16_value(m_bits[i]), v = bf16_value(v_bits[i]);
    adamw_element(p[i], m, v, grad[i] * grad_scale, decay, factors);
    store_moments(m_bits[i], v_bits[i], m, v, random[flat % 4]);
    finite = finite && std::isfinite(p[i]) && std::isfinite(m) && std::isfinite(v);
  }
  return finite;
}

}  // namespace

void adamw_step(std::span<AdamWTensor> tensors, const AdamWDesc& desc) {
  const double norm = desc.norm.defined() ? *desc.norm.data<double>() : 0;
  if (!std::isfinite(norm)) return;
  const double grad_scale = clip_scale(norm, desc.max_norm);
  const auto blocks = split_into_blocks(
      tensors.size(), [&](size_t i) -> const Tensor& { return tensors[i].param; });
  std::atomic<bool> finite = true;
  for_blocks(blocks, [&](size_t b) {
    AdamWTensor& tensor = tensors[blocks[b].tensor];
    if (tensor.m.dtype() == DType::kBF16) {
      if (!update_bf16_moments(tensor, desc, static_cast<float>(grad_scale), blocks[b].begin,
                               blocks[b].end))
        finite = false;
      return;
    }
    dispatch_float(tensor.param.dtype(), "adamw", [&]<class T>() {
      if (!update(tensor, desc, static_cast<T>(grad_scale), blocks[b].begin, blocks[b].end))
        finite = false;
    });
  });
  if (!finite && desc.non_finite.defined()) Tensor(desc.non_finite).fill_(1);
}

void grad_norm(Tensor& norm, std::span<const Tensor> tensors) {
  const auto blocks =
      split_into_blocks(tensors.size(), [&](size_t i) -> const Tensor& { return tensors[i]; });
  std::vector<double> squares(blocks.size());
  for_blocks(blocks, [&](size_t b) {
    const Tensor& tensor = tensors[blocks[b].tensor];
    dispatch_float(tensor.dtype(), "grad_norm", [&]<class T>() {
      const T* g = tensor.data<T>() + blocks[b].begin;
      squares[b] = lane_sum<double>(blocks[b].end - blocks[b].begin, [&](int64_t i) {
        return static_cast<double>(g[i]) * static_cast<double>(g[i]);
      });
    });
  });
  double total = 0;
  for (const double s : squares) total += s;
  *norm.data<double>() = std::sqrt(total);
}

}  // namespace cohort::kernels::cpu
