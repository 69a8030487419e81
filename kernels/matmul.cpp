#include "kernels/matmul.h"

#include "core/with_cuda.h"

namespace cohort::kernels {

void matmul(const Matmul& args) {
  const auto& [c, a, b, desc] = args;
  const bool flip_a = desc.a == Transpose::kYes, flip_b = desc.b == Transpose::kYes;
  const int64_t m = flip_a ? a.cols() : a.rows(), k = flip_a ? a.rows() : a.cols();
  const int64_t n = flip_b ? b.rows() : b.cols(), k_b = flip_b ? b.cols() : b.rows();
  COHORT_CHECK(k == k_b, "[matmul] inner sizes differ: ", m, " x ", k, " times ", k_b, " x ", n,
               " from ", a.str(), " and ", b.str());
  COHORT_CHECK(c.rows() == m && c.cols() == n, "[matmul] expected c ", m, " x ", n, ", got ",
               c.str());
  const Device device = a.device();
  const DType out = c.dtype() == accumulate_dtype(a.dtype()) ? c.dtype() : a.dtype();
  for (const auto& [t, name] : {std::pair(&a, "a"), {&b, "b"}}) {
    check_rows(*t, t->shape(), a.dtype(), "matmul", name, device);
    COHORT_CHECK(t->is_contiguous() || t->rank() == 2, "[matmul] expected a strided ", name,
                 " of rank 2, got ", t->str());
  }
  check_tensor(c, c.shape(), out, "matmul", "c", device);
  on_device<cpu::matmul, cuda::matmul>(device, args);
}

void linear_forward(const LinearForward& args) {
  const auto& [y, x, w, bias, tail] = args;
  COHORT_CHECK(w.rank() == 2, "[linear] expected w of rank 2, got ", w.str());
  const int64_t k = w.dim(1), n = w.dim(0);
  COHORT_CHECK(x.cols() == k, "[linear] expected x with rows of ", k, ", got ", x.str());
  COHORT_CHECK(tail >= 0 && tail <= k, "[linear] expected a tail of at most ", k, " columns, got ",
               tail);
  COHORT_CHECK(y.cols() == n && y.rows() == x.rows(), "[linear] expected y ", x.rows(), " x ", n,
               ", got ", y.str());
  const Device device = x.device();
  check_tensor(x, x.shape(), x.dtype(), "linear", "x", device);
  check_tensor(w, w.shape(), x.dtype(), "linear", "w", device);
  check_tensor(y, y.shape(), x.dtype(), "linear", "y", device);
  if (bias.defined()) check_tensor(bias, {n}, x.dtype(), "linear", "bias", device);
  on_device<cpu::linear_forward, cuda::linear_forward>(device, args);
}

void bias_backward(const BiasBackward& args) {
  const auto& [dbias, dy] = args;
  const DType accumulate = accumulate_dtype(dy.dtype());
  check_tensor(dy, dy.shape(), dy.dtype(), "bias_backward", "dy", dy.device());
  check_tensor(dbias.tensor, {dy.cols()}, accumulate, "bias_backward", "dbias", dy.device());
  on_device<cpu::bias_backward, cuda::bias_backward>(dy.device(), args);
}

}  // namespace cohort::kernels
