#include "kernels/embedding.h"

#include "core/with_cuda.h"
#include "kernels/arguments.h"

namespace cohort::kernels {

void embedding_forward(const EmbeddingForward& args) {
  ArgumentCheck("embedding")("[V, C] table; i32 [T] ids; [T, C] y", args.table, args.ids, args.y);
  on_device<cpu::embedding_forward, cuda::embedding_forward>(args.table.device(), args);
}

void embedding_backward(const EmbeddingBackward& args) {
  ArgumentCheck check("embedding_backward");
  check("[T, C] dy; i32 [T] ids; accumulate [V, C] dtable", args.dy, args.ids, args.dtable);
  on_device<cpu::embedding_backward, cuda::embedding_backward>(args.dy.device(), args);
}

}  // namespace cohort::kernels
