#include "kernels/optimizer.h"

#include "core/with_cuda.h"
#include "kernels/adamw.h"
#include "kernels/arguments.h"

namespace cohort::kernels {
namespace {

void check_adamw(std::span<AdamWTensor> tensors, const AdamWDesc& d, Device device) {
  constexpr const char* kOp = "adamw";
  COHORT_CHECK(d.step >= 1, "[adamw] steps count from 1, got ", d.step);
  COHORT_CHECK(d.beta1 >= 0 && d.beta1 < 1 && d.beta2 >= 0 && d.beta2 < 1,
               "[adamw] expected betas in [0, 1), got ", d.beta1, " and ", d.beta2);
  ArgumentCheck(kOp, device)("f64 [1] norm?, non_finite?", d.norm, d.non_finite);
  COHORT_CHECK(d.max_norm >= 0, "[adamw] expected a max_norm of 0 or more, got ", d.max_norm);
  for (const AdamWTensor& t : tensors) {
    const DType dtype = t.param.dtype();
    ArgumentCheck check(kOp, device);
    check("[...] param; accumulate [...] grad", t.param, t.grad);
    if (t.m.dtype() == DType::kBF16 && accumulate_dtype(dtype) == DType::kF32)
      check("bf16 [...] m, v", t.m, t.v);
    else
      check("accumulate [...] m, v", t.m, t.v);
    if (dtype == DType::kBF16)
      check("u8 [2 numel] low_bits", t.low_bits);
    else
      COHORT_CHECK(!t.low_bits.defined(), "[adamw] ", t.param.str(), " needs no low bits");
    if (device.is_cpu()) dispatch_float(dtype, kOp, []<class T>() {});
  }
}

// The parts of masters on the CPU.
ArgumentCheck check_parts(const char* op, const Tensor& param, const Tensor& low_bits) {
  ArgumentCheck check(op, Device{});
  check("bf16 [...] param; u8 [2 numel] low_bits", param, low_bits);
  return check;
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
  ArgumentCheck(kOp)("f64 [1] norm", norm);
  for (const Tensor& t : tensors) {
    if (device.is_cpu()) {
      ArgumentCheck(kOp, device)("[...] tensor", t);
      dispatch_float(t.dtype(), kOp, []<class T>() {});
    } else {
      ArgumentCheck(kOp, device)("f32 [...] tensor", t);
    }
  }
  on_device<cpu::grad_norm, cuda::grad_norm>(device, norm, tensors);
}

Tensor combine_master(const Tensor& param, const Tensor& low_bits) {
  check_parts("combine_master", param, low_bits);
  Tensor master = Tensor::empty(param.shape(), DType::kF32);
  if (is_dry_run()) return master;
  const auto* weight = static_cast<const uint16_t*>(param.raw());
  const auto* low = static_cast<const uint16_t*>(low_bits.raw());
  float* out = master.data<float>();
  for (int64_t i = 0; i < param.numel(); ++i) out[i] = combined({weight[i], low[i]});
  return master;
}

void split_master(Tensor& param, Tensor& low_bits, const Tensor& master) {
  check_parts("split_master", param, low_bits)("f32 [...] master", master);
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
