#include "kernels/lora.h"

#include "core/sizes.h"
#include "core/with_cuda.h"
#include "kernels/arguments.h"
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
  const auto& [dh, db, dy, h, sb, modules, scale] = args;
  ArgumentCheck check("lora_output_gradients");
  check("[T, N] dy; strided [N, P] sb; [T, P] dh", dy, sb, dh);
  if (!db.wanted()) return;
  check("[T, P] h; accumulate [R, r] db", h, db);
  int64_t rows = 0;
  check.require(!modules.empty(), "expected at least one module");
  for (const AdapterSlice& module : modules) {
    check.require(module.row >= 0 && module.rows > 0 && module.row + module.rows <= check["N"],
                  "expected modules among ", check["N"], " rows, got rows ", module.row, " to ",
                  module.row + module.rows - 1);
    rows += module.rows;
  }
  const int64_t columns = static_cast<int64_t>(modules.size()) * check["r"];
  check.require(rows == check["R"] && columns <= check["P"], "expected db [", rows, ", r] of ",
                modules.size(), " modules with at most ", check["P"], " columns, got ", db.tensor);
}

void output_gradients_by_gemm(const LoraOutputGradients& args) {
  const auto& [dh, db, dy, h, sb, modules, scale] = args;
  matmul({.c = dh, .a = dy, .b = sb, .desc = {.split_k = SplitK::kAllowed}});
  if (!db.wanted()) return;
  const int64_t rank = db.tensor.cols();
  int64_t row = 0, column = 0;
  for (const AdapterSlice& module : modules) {
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
    for (const AdapterSlice& module : args.modules)
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
  const auto& [h, x, a, copy] = args;
  const Device device = x.device();
  ArgumentCheck check("lora_input");
  check("strided [T, K] x; [P, K] a; strided [T, P] h; [T, P] copy?", x, a, h, copy);
  if constexpr (kWithCuda)
    if (device.is_cuda() && !is_dry_run() && cuda::has_lora_kernel(args))
      return on_device<cpu::lora_input, cuda::lora_input>(device, args);
  if (device.is_cuda()) return lora_input_by_gemm(args);
  on_device<cpu::lora_input, cuda::lora_input>(device, args);
}

void select_adapters(const SelectAdapters& args) {
  ArgumentCheck check("select_adapters");
  check("strided [T, C] h; i32 [T] rows?; i32 [R] adapters?", args.h, args.rows, args.adapters);
  check.require(args.columns > 0 && check["C"] % args.columns == 0 &&
                    args.rows.defined() == args.adapters.defined(),
                "expected a multiple of ", args.columns, " columns, got ", check["C"]);
  on_device<cpu::select_adapters, cuda::select_adapters>(args.h.device(), args);
}

}  // namespace cohort::kernels
