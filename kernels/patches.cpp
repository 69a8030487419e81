#include "kernels/patches.h"

#include "core/with_cuda.h"
#include "kernels/arguments.h"

namespace cohort::kernels {

void patches(const Patches& args) {
  ArgumentCheck check("patches");
  check("[R, K] y; u8 [N, H, W, c] pixels; accumulate [c, B] values", args.y, args.pixels,
        args.values);
  const int64_t p = args.size;
  check.require(p > 0 && check["H"] % p == 0 && check["W"] % p == 0 && check["B"] == 256 &&
                    check["K"] == check["c"] * p * p &&
                    check["R"] * p * p == check["N"] * check["H"] * check["W"],
                "expected patches of ", p, "^2 pixels of ", args.pixels, " as rows, got ", args.y);
  on_device<cpu::patches, cuda::patches>(args.y.device(), args);
}

}  // namespace cohort::kernels
