// Checks of kv_scales().
#include "kernels/kv_scales.h"

#include "core/with_cuda.h"
#include "kernels/arguments.h"

namespace cohort::kernels {

void kv_scales(const KvScales& args) {
  ArgumentCheck check("kv_scales");
  check("f32 [N] scales; strided [rows, C] w; [C] norm", args.scales, args.w, args.norm);
  check("[rows] bias?; [C] norm_bias?; [D] k_norm?, q_norm?", args.bias, args.norm_bias,
        args.k_norm, args.q_norm);
  check.require(args.a.defined() == args.sb.defined(), "expected a and sb, or neither");
  check("strided [rows, P] sb?; [P, C] a?", args.sb, args.a);
  const int64_t heads = check["N"], rows = check["rows"];
  check.require(args.kv_heads > 0 && heads >= 2 * args.kv_heads && rows > 0 &&
                    rows % (2 * heads) == 0 &&
                    (!args.k_norm.defined() || check["D"] * heads == rows),
                "expected w [N D, C] with ", heads, " heads of an even size, of which ",
                args.kv_heads, " are keys and as many values, got ", args.w);
  on_device<cpu::kv_scales, cuda::kv_scales>(args.w.device(), args);
}

}  // namespace cohort::kernels
