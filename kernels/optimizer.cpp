#include "kernels/optimizer.h"

#include "core/with_cuda.h"
#include "kernels/adamw.h"

namespace cohort::kernels {
namespace {

void check_norm(const Tensor& norm, Device device, const char* op) {
  COHORT_CHECK(norm.numel() == 1, "[", op, "] expected norm of one element, got ", norm.str());
  check_tensor(norm, norm.shape(), DType::kF64, op, "norm", device);
}

void check_adamw(std::span<AdamWTensor> tensors, const AdamWDesc& d, Device device) {
  constexpr const char* kOp = "adamw";
  COHORT_CHECK(d.step >= 1, "[adamw] steps count from 1, got ", d.step);
  COHORT_CHECK(d.beta1 >= 0 && d.beta1 < 1 && d.beta2 >= 0 && d.beta2 < 1,
               "[adamw] expected betas in [0, 1), got ", d.beta1, " and ", d.beta2);
  if (d.norm.defined()) check_norm(d.norm, device, kOp);
  if (d.non_finite.defined())
    check_tensor(d.non_finite, {1}, DType::kF64, kOp, "non_finite", device);
  COHORT_CHECK(d.max_norm >= 0, "[adamw] expected a max_norm of 0 or more, got ", d.max_norm);
  for (const AdamWTensor& t : tensors) {
    const DType dtype = t.param.dtype();
    const Shape& shape = t.param.shape();
    check_tensor(t.param, shape, dtype, kOp, "param", device);
    check_tensor(t.grad, shape, accumulate_dtype(dtype), kOp, "grad", device);
    const bool small = t.m.dtype() == DType::kBF16 && accumulate_dtype(dtype) == DType::kF32;
    const DType moments = small ? DType::kBF16 : accumulate_dtype(dtype);
    check_tensor(t.m, shape, moments, kOp, "m", device);
    check_tensor(t.v, shape, moments, kOp, "v", device);
    if (dtype == DType::kBF16)
      check_tensor(t.low_bits, {2 * shape.numel()}, DType::kU8, kOp, "low_bits", device);
    else
      COHORT_CHECK(!t.low_bits.defined(), "[adamw] ", t.param.str(), " needs no low bits");
    if (device.is_cpu()) dispatch_float(dtype, kOp, []<class T>() {});
  }
}

}  // namespace

void adamw_step(std::span<AdamWTensor> tensors, const AdamWDesc& desc) {
  if (tensors.empty()) return;
  const Device device = tensors[0].param.device();
  check_adamw(tensors, desc, device);
  on_device<cpu::adamw_step, cuda::adamw_step>(device, tensors, desc);
}

void grad_norm(Tensor& norm, std::span<const Tensor> tensors) {
  constexpr const char* kOp = "grad_norm";
  const Device device = norm.device();
  check_norm(norm, device, kOp);
  for (const Tensor& t : tensors) {
    check_tensor(t, t.shape(), device.is_cpu() ? t.dtype() : DType::kF32, kOp, "tensor", device);
    if (device.is_cpu()) dispatch_float(t.dtype(), kOp, []<class T>() {});
  }
  on_device<cpu::grad_norm, cuda::grad_norm>(device, norm, tensors);
}

Tensor combine_master(const Tensor& param, const Tensor& low_bits) {
  check_tensor(param, param.shape(), DType::kBF16, "combine_master", "param", {});
  check_tensor(low_bits, {2 * param.numel()}, DType::kU8, "combine_master", "low_bits", {});
  Tensor master = Tensor::empty(param.shape(), DType::kF32);
  if (is_dry_run()) return master;
  const auto* weight = static_cast<const uint16_t*>(param.raw());
  const auto* low = static_cast<const uint16_t*>(low_bits.raw());
  float* out = master.data<float>();
  for (int64_t i = 0; i < param.numel(); ++i) out[i] = combined({weight[i], low[i]});
  return master;
}

void split_master(Tensor& param, Tensor& low_bits, const Tensor& master) {
  check_tensor(master, master.shape(), DType::kF32, "split_master", "master", {});
  check_tensor(param, master.shape(), DType::kBF16, "split_master", "param", {});
  check_tensor(low_bits, {2 * master.numel()}, DType::kU8, "split_master", "low_bits", {});
  const float* in = master.data<float>();
  auto* weight = static_cast<uint16_t*>(param.raw());
  auto* low = static_cast<uint16_t*>(low_bits.raw());
  for (int64_t i = 0; i < master.numel(); ++i) {
    const MasterParts parts = master_parts(in[i]);
    weight[i] = parts.weight;
    low[i] = parts.low;
  }
}

}  // namespace cohort::kernels
