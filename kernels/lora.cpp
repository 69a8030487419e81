#include "kernels/lora.h"

#include "core/sizes.h"
#include "core/with_cuda.h"
#include "kernels/matmul.h"

namespace cohort::kernels {
namespace {

// On CUDA without a kernel of its own. cuBLASLt writes contiguous matrices only; they are allocated
// here and not in the device's code, so that a dry run, which knows of no kernels, counts them.
void lora_input_by_gemm(const LoraInput& args) {
  const auto& [h, x, a, copy] = args;
  Tensor product = copy.defined()      ? copy
                   : h.is_contiguous() ? h
                                       : Tensor::empty(h.shape(), h.dtype(), h.device());
  matmul({.c = product, .a = x, .b = a, .desc = {.b = Transpose::kYes}});
  if (copy.defined() || !h.is_contiguous()) h.copy_(product);
}

void check(const LoraOutputGradients& args) {
  constexpr const char* kOp = "lora_output_gradients";
  const auto& [dh, db, dy, h, sb, modules, scale] = args;
  const Device device = dy.device();
  COHORT_CHECK(dy.rank() == 2 && sb.rank() == 2 && sb.dim(0) == dy.dim(1), "[", kOp,
               "] expected a row of sb for every column of dy, got ", sb.str(), " and ", dy.str());
  const Shape shape{dy.dim(0), sb.dim(1)};
  check_tensor(dy, dy.shape(), dy.dtype(), kOp, "dy", device);
  check_rows(sb, sb.shape(), dy.dtype(), kOp, "sb", device);
  check_tensor(dh, shape, dy.dtype(), kOp, "dh", device);
  if (!db.wanted()) return;
  check_tensor(h, shape, dy.dtype(), kOp, "h", device);
  int64_t rows = 0;
  COHORT_CHECK(!modules.empty(), "[", kOp, "] expected at least one module");
  for (const LoraModule& module : modules) {
    COHORT_CHECK(module.row >= 0 && module.rows > 0 && module.row + module.rows <= dy.dim(1), "[",
                 kOp, "] expected modules among ", dy.dim(1), " rows, got rows ", module.row,
                 " to ", module.row + module.rows - 1);
    rows += module.rows;
  }
  const int64_t rank = db.tensor.cols(), columns = static_cast<int64_t>(modules.size()) * rank;
  check_grad(db, {rows, rank}, accumulate_dtype(dy.dtype()), kOp, "db", device);
  COHORT_CHECK(columns <= shape[1], "[", kOp, "] expected at most ", shape[1], " columns, got ",
               columns);
}

void output_gradients_by_gemm(const LoraOutputGradients& args) {
  const auto& [dh, db, dy, h, sb, modules, scale] = args;
  matmul({.c = dh, .a = dy, .b = sb, .desc = {.split_k = SplitK::kAllowed}});
  if (!db.wanted()) return;
  const int64_t rank = db.tensor.cols();
  int64_t row = 0, column = 0;
  for (const LoraModule& module : modules) {
    Tensor part = db.tensor.narrow(0, row, module.rows);
    matmul({.c = part,
            .a = dy.narrow(1, module.row, module.rows),
            .b = h.narrow(1, column, rank),
            .desc = {.a = Transpose::kYes, .out = db.mode, .scale = scale}});
    row += module.rows;
    column += rank;
  }
}

// The blocks that need the least time, counted in bytes: those of all multiprocessors while the
// blocks read dy and h, and those of the partial sums, written and read. It depends on the shapes
// alone, and so do the orders of the sums: there are at most as many blocks in a wave as an H100
// has multiprocessors.
cuda::LoraBlocks blocks_of(const LoraOutputGradients& args) {
  using Blocks = cuda::LoraBlocks;
  constexpr int64_t kWave = 132, kBoxBytes = Blocks::kTileRows * Blocks::kBoxColumns * 2;
  const Shape& db = args.db.tensor.shape();
  const int64_t rows = args.dy.dim(0), rank = db[1];
  const int64_t all_tiles = ceil_div(rows, Blocks::kTileRows);
  Blocks best;
  for (int64_t boxes = 1, least = 0; boxes <= Blocks::kMaxBoxes; ++boxes) {
    int64_t strips = 0;
    for (const LoraModule& module : args.modules)
      strips += ceil_div(ceil_div(module.rows, Blocks::kBoxColumns), boxes);
    const int64_t tiles =
        std::max<int64_t>(ceil_div(all_tiles, std::max<int64_t>(kWave / strips, 1)), 1);
    const int64_t ranges = ceil_div(all_tiles, tiles), waves = ceil_div(strips * ranges, kWave);
    const int64_t partials = (strips * rows + ranges * db[0]) * rank * int64_t{sizeof(float)};
    const int64_t cost = kWave * waves * tiles * (2 * boxes + 1) * kBoxBytes / 2 + 2 * partials;
    if (boxes > 1 && cost >= least) continue;
    least = cost;
    best = {.boxes = boxes, .tiles = tiles, .strips = strips, .ranges = ranges};
  }
  // Allocated here and not in the device's code, so that a dry run counts them.
  best.dh = Tensor::empty({best.strips, rows, rank}, DType::kF32, args.dy.device());
  best.db = Tensor::empty({best.ranges, db[0], rank}, DType::kF32, args.dy.device());
  return best;
}

}  // namespace

void lora_output_gradients(const LoraOutputGradients& args) {
  check(args);
  const OpSpan span("lora_output_gradients");
  if constexpr (kWithCuda)
    if (args.dy.device().is_cuda() && !is_dry_run() && cuda::has_lora_kernel(args))
      return cuda::lora_output_gradients(args, blocks_of(args));
  // A dry run does not know whether the GPU has the kernel, and counts its partial sums.
  cuda::LoraBlocks blocks;
  if (is_dry_run() && args.dy.dtype() == DType::kBF16 && args.db.wanted()) blocks = blocks_of(args);
  output_gradients_by_gemm(args);
}

void lora_input(const LoraInput& args) {
  constexpr const char* kOp = "lora_input";
  const auto& [h, x, a, copy] = args;
  const Device device = x.device();
  COHORT_CHECK(x.rank() == 2 && a.rank() == 2 && x.dim(1) == a.dim(1), "[", kOp,
               "] expected rows of x and a of one length, got ", x.str(), " and ", a.str());
  const Shape shape{x.dim(0), a.dim(0)};
  check_rows(x, x.shape(), x.dtype(), kOp, "x", device);
  check_tensor(a, a.shape(), x.dtype(), kOp, "a", device);
  check_rows(h, shape, x.dtype(), kOp, "h", device);
  if (copy.defined()) check_tensor(copy, shape, x.dtype(), kOp, "copy", device);
  if constexpr (kWithCuda)
    if (device.is_cuda() && !is_dry_run() && cuda::has_lora_kernel(args))
      return on_device<cpu::lora_input, cuda::lora_input>(device, args);
  if (device.is_cuda()) return lora_input_by_gemm(args);
  on_device<cpu::lora_input, cuda::lora_input>(device, args);
}

}  // namespace cohort::kernels
