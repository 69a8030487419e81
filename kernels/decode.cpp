#include "kernels/decode.h"

#include "core/with_cuda.h"

namespace cohort::kernels {
namespace {

void check_i32(const Tensor& t, int64_t n, const char* op, const char* name, Device device) {
  check_tensor(t, {n}, DType::kI32, op, name, device);
}

void check_slots(const Tensor& slots, const char* op) {
  COHORT_CHECK(slots.rank() == 2 && slots.dim(1) == kSlotColumns, "[", op, "] expected slots [S, ",
               int{kSlotColumns}, "], got ", slots.str());
  check_tensor(slots, slots.shape(), DType::kI32, op, "slots", slots.device());
}

}  // namespace

void decode_inputs(const DecodeInputs& args) {
  constexpr const char* kOp = "decode_inputs";
  check_slots(args.slots, kOp);
  const Device device = args.slots.device();
  const int64_t n = args.rows.numel();
  check_i32(args.rows, n, kOp, "rows", device);
  check_i32(args.tokens, n, kOp, "tokens", device);
  check_i32(args.positions, n, kOp, "positions", device);
  check_i32(args.active, n, kOp, "active", device);
  check_tensor(args.rng_index, {n}, DType::kI64, kOp, "rng_index", device);
  on_device<cpu::decode_inputs, cuda::decode_inputs>(device, args);
}

void decode_advance(const DecodeAdvance& args) {
  constexpr const char* kOp = "decode_advance";
  check_slots(args.slots, kOp);
  const Device device = args.slots.device();
  const int64_t n = args.active.numel();
  check_i32(args.active, n, kOp, "active", device);
  check_i32(args.tokens, n, kOp, "tokens", device);
  COHORT_CHECK(args.stop_tokens.rank() == 2 && args.stop_tokens.dim(0) == args.slots.dim(0), "[",
               kOp, "] expected stop_tokens [S, K], got ", args.stop_tokens.str());
  check_tensor(args.stop_tokens, args.stop_tokens.shape(), DType::kI32, kOp, "stop_tokens", device);
  on_device<cpu::decode_advance, cuda::decode_advance>(device, args);
}

void set_elements(const SetElements& args) {
  constexpr const char* kOp = "set_elements";
  const Device device = args.t.device();
  check_tensor(args.t, args.t.shape(), DType::kI32, kOp, "t", device);
  check_i32(args.at, args.at.numel(), kOp, "at", device);
  check_i32(args.values, args.at.numel(), kOp, "values", device);
  on_device<cpu::set_elements, cuda::set_elements>(device, args);
}

void set_rows(const SetRows& args) {
  constexpr const char* kOp = "set_rows";
  const Device device = args.t.device();
  COHORT_CHECK(args.t.rank() >= 1 && args.rows.rank() == args.t.rank(),
               "[set_rows] expected rows like those of ", args.t.str(), ", got ", args.rows.str());
  check_tensor(args.t, args.t.shape(), args.t.dtype(), kOp, "t", device);
  Shape shape = args.t.shape();
  shape[0] = args.at.numel();
  check_tensor(args.rows, shape, args.t.dtype(), kOp, "rows", device);
  check_i32(args.at, args.at.numel(), kOp, "at", device);
  on_device<cpu::set_rows, cuda::set_rows>(device, args);
}

void copy_blocks(const CopyBlocks& args) {
  constexpr const char* kOp = "copy_blocks";
  const Device device = args.pages.device();
  COHORT_CHECK(args.pages.rank() >= 2, "[copy_blocks] expected pages [P, blocks, ...], got ",
               args.pages.str());
  check_tensor(args.pages, args.pages.shape(), args.pages.dtype(), kOp, "pages", device);
  check_i32(args.from_to, args.from_to.numel() / 2 * 2, kOp, "from_to", device);
  on_device<cpu::copy_blocks, cuda::copy_blocks>(device, args);
}

}  // namespace cohort::kernels
