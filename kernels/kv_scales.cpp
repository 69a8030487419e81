// Checks of kv_scales().
#include "kernels/kv_scales.h"

#include "core/with_cuda.h"
#include "kernels/arguments.h"

namespace cohort::kernels {

void kv_scales(const KvScales& args) {
  ArgumentCheck check("kv_scales");
  check("f32 [2, Hkv] scales; strided [rows, C] w; [C] norm", args.scales, args.w, args.norm);
  check("[rows] bias?; [C] norm_bias?; [D] k_norm?", args.bias, args.norm_bias, args.k_norm);
  check.require(args.a.defined() == args.sb.defined(), "expected a and sb, or neither");
  check("strided [rows, P] sb?; [P, C] a?", args.sb, args.a);
  const int64_t heads = 2 * check["Hkv"], rows = check["rows"];
  check.require(heads > 0 && rows > 0 && rows % (2 * heads) == 0 &&
                    (!args.k_norm.defined() || check["D"] * heads == rows),
                "expected w [2 Hkv D, C] with ", heads / 2, " key heads of an even size, got ",
                args.w);
  on_device<cpu::kv_scales, cuda::kv_scales>(args.w.device(), args);
}

}  // namespace cohort::kernels
