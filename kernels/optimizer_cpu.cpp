// AdamW and the gradient norm over many tensors at once: all tensors are cut into fixed blocks, and
// one parallel loop runs over the blocks of all of them.
#include "kernels/optimizer.h"

#include <cmath>
#include <vector>

#include "core/parallel.h"
#include "kernels/reduce.h"
#include "kernels/vector_math.h"

namespace cohort::kernels {
namespace {

struct Block {
  size_t tensor;
  int64_t begin, end;
};

// tensor(i) is tensor number i.
template <class F>
std::vector<Block> cut(size_t count, F&& tensor) {
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

// The factors of one step, rounded once.
template <class T>
struct Factors {
  T decay, grad_scale, beta2, new_m, new_v, root_correction, eps, step_size;
};

template <class T>
Factors<T> factors(const AdamWDesc& d, double weight_decay) {
  const double correction1 = 1 - std::pow(d.beta1, static_cast<double>(d.step));
  const double correction2 = 1 - std::pow(d.beta2, static_cast<double>(d.step));
  return {.decay = static_cast<T>(1 - d.learning_rate * weight_decay),
          .grad_scale = static_cast<T>(d.grad_scale),
          .beta2 = static_cast<T>(d.beta2),
          .new_m = static_cast<T>(1 - d.beta1),
          .new_v = static_cast<T>(1 - d.beta2),
          .root_correction = static_cast<T>(std::sqrt(correction2)),
          .eps = static_cast<T>(d.eps),
          .step_size = static_cast<T>(d.learning_rate / correction1)};
}

// m is moved towards g (PyTorch's lerp) instead of being summed from two products.
template <class T>
void update(AdamWTensor& tensor, const Factors<T>& f, int64_t begin, int64_t end) {
  T *p = tensor.param.data<T>(), *m = tensor.m.data<T>(), *v = tensor.v.data<T>();
  const T* grad = tensor.grad.data<T>();
  COHORT_VECTORIZE
  for (int64_t i = begin; i < end; ++i) {
    const T g = grad[i] * f.grad_scale;
    const T decayed = p[i] * f.decay;
    m[i] = m[i] + f.new_m * (g - m[i]);
    v[i] = v[i] * f.beta2 + f.new_v * g * g;
    const T denominator = std::sqrt(v[i]) / f.root_correction + f.eps;
    p[i] = decayed - f.step_size * m[i] / denominator;
  }
}

void check_adamw(std::span<AdamWTensor> tensors, const AdamWDesc& d) {
  constexpr const char* kOp = "adamw";
  COHORT_CHECK(d.step >= 1, "[adamw] steps count from 1, got ", d.step);
  COHORT_CHECK(d.beta1 >= 0 && d.beta1 < 1 && d.beta2 >= 0 && d.beta2 < 1,
               "[adamw] expected betas in [0, 1), got ", d.beta1, " and ", d.beta2);
  for (const AdamWTensor& t : tensors) {
    check_tensor(t.param, t.param.shape(), t.param.dtype(), kOp, "param");
    check_tensor(t.grad, t.param.shape(), t.param.dtype(), kOp, "grad");
    check_tensor(t.m, t.param.shape(), t.param.dtype(), kOp, "m");
    check_tensor(t.v, t.param.shape(), t.param.dtype(), kOp, "v");
    dispatch_float(t.param.dtype(), kOp, []<class T>() {});
  }
}

}  // namespace

void adamw_step(std::span<AdamWTensor> tensors, const AdamWDesc& desc) {
  check_adamw(tensors, desc);
  const auto blocks =
      cut(tensors.size(), [&](size_t i) -> const Tensor& { return tensors[i].param; });
  for_blocks(blocks, [&](size_t b) {
    AdamWTensor& tensor = tensors[blocks[b].tensor];
    dispatch_float(tensor.param.dtype(), "adamw", [&]<class T>() {
      update(tensor, factors<T>(desc, tensor.weight_decay), blocks[b].begin, blocks[b].end);
    });
  });
}

void grad_norm(Tensor& norm, std::span<const Tensor> tensors) {
  constexpr const char* kOp = "grad_norm";
  COHORT_CHECK(norm.numel() == 1, "[grad_norm] expected norm of one element, got ", norm.str());
  check_tensor(norm, norm.shape(), DType::kF64, kOp, "norm");
  for (const Tensor& t : tensors)
    dispatch_float(t.dtype(), kOp,
                   [&]<class T>() { check_tensor(t, t.shape(), t.dtype(), kOp, "tensor"); });
  const auto blocks = cut(tensors.size(), [&](size_t i) -> const Tensor& { return tensors[i]; });
  std::vector<double> squares(blocks.size());
  for_blocks(blocks, [&](size_t b) {
    const Tensor& tensor = tensors[blocks[b].tensor];
    dispatch_float(tensor.dtype(), kOp, [&]<class T>() {
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

}  // namespace cohort::kernels
