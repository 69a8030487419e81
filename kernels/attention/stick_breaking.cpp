#include "kernels/attention/stick_breaking.h"

#include "core/with_cuda.h"
#include "kernels/attention/checks.h"

namespace cohort::kernels {
namespace {

void check_scale(const StickBreakingDesc& desc, const char* op) {
  COHORT_CHECK(desc.scale >= 0 && std::isfinite(desc.scale), "[", op,
               "] expected a scale of at least 0, got ", desc.scale);
}

// Checks common to the forward and the backward.
template <class Args>
void check_packed(const Args& args, const char* op) {
  const PackedSizes sizes = check_qkv(args.q, args.k, args.v, args.cu_seqlens, op);
  for (const auto& [t, name] : {std::pair(&args.q, "q"), {&args.k, "k"}, {&args.v, "v"}})
    check_rows(*t, t->shape(), t->dtype(), op, name, t->device());
  COHORT_CHECK(args.k.strides()[0] == args.v.strides()[0], "[", op,
               "] expected equal token strides of k and v, got ", args.k.strides()[0], " and ",
               args.v.strides()[0], " elements");
  check_scale(args.desc, op);
  if (args.desc.prefixes.defined())
    check_tensor(args.desc.prefixes, {sizes.sequences, 2}, DType::kI32, op, "prefixes",
                 args.q.device());
}

}  // namespace

void stick_breaking_forward(const StickBreakingForward& args) {
  constexpr const char* kOp = "stick_breaking_forward";
  const Tensor& q = args.q;
  check_packed(args, kOp);
  check_rows(args.o, q.shape(), q.dtype(), kOp, "o", q.device());
  on_device<cpu::stick_breaking_forward, cuda::stick_breaking_forward>(q.device(), args);
}

void stick_breaking_backward(const StickBreakingBackward& args) {
  constexpr const char* kOp = "stick_breaking_backward";
  const Tensor& q = args.q;
  const Device device = q.device();
  check_packed(args, kOp);
  check_rows(args.dq.tensor, q.shape(), q.dtype(), kOp, "dq", device);
  check_rows(args.dk.tensor, args.k.shape(), q.dtype(), kOp, "dk", device);
  check_rows(args.dv.tensor, args.k.shape(), q.dtype(), kOp, "dv", device);
  check_tensor(args.dout, q.shape(), q.dtype(), kOp, "dout", device);
  on_device<cpu::stick_breaking_backward, cuda::stick_breaking_backward>(device, args);
}

void stick_breaking_paged(const StickBreakingPaged& args) {
  constexpr const char* kOp = "stick_breaking_paged";
  check_paged_tensors({args.o, args.q, args.cache, args.sequences, args.positions}, kOp);
  check_scale(args.desc, kOp);
  COHORT_CHECK(!args.desc.prefixes.defined(), "[", kOp, "] expected no prefixes");
  on_device<cpu::stick_breaking_paged, cuda::stick_breaking_paged>(args.cache.k.device(), args);
}

}  // namespace cohort::kernels
