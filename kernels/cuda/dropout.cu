// Dropout on CUDA: one Philox call serves four adjacent elements of one thread. The random draws
// take as long as the memory accesses, so words are compared as integers, the division is a
// multiplication, and registers are limited, so that many resident blocks overlap the two.
#include "kernels/cuda/rows.cuh"
#include "kernels/dropout.h"

namespace cohort::kernels::cuda {
namespace {

// A block has one token, or several with few columns; a thread draws for its own packs. The words
// of one Philox call belong to four adjacent columns, independent of the layout.
template <class T>
__global__ void __launch_bounds__(kMaxGroup, 2)
    dropout_kernel(T* y, const T* x, const DropoutMask<float> mask, bool accumulate,
                   const RowLayout layout) {
  constexpr int N = RowSlice<T>::N;
  static_assert(N % 4 == 0);
  const RowSlice<T> at(layout);
  if (at.cols == 0) return;
  const int64_t start = at.row * layout.cols;
  typename RowSlice<T>::Packs in;
  at.load(x + start, 0, in);  // in flight during the draws
  const uint64_t row_stream = mask.row(at.row);
  for (int tile = 0; tile < layout.tiles; ++tile) {
    // The loads of a long row's later tiles are overlapped only by other blocks.
    if (tile > 0) at.load(x + start, tile, in);
#pragma unroll
    for (int u = 0; u < kRowPacks; ++u) {
      // Packs entirely past the row are skipped; the last one may extend past it and is truncated
      // by the store.
      const int c = at.column(tile, u);
      if (c >= at.cols) continue;
      float out[N];
#pragma unroll
      for (int n = 0; n < N; n += 4) {
        // Philox address: (seed, stream of the token, column / 4). The four words belong to columns
        // c + n to c + n + 3.
        const auto bits = philox(mask.seed, row_stream, static_cast<uint32_t>(c + n) / 4);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          // dropout_first_kept() is the smallest word that is not below p.
          const bool keep = bits[static_cast<size_t>(k)] >= mask.first_kept;
          out[n + k] = keep ? element(in[u], n + k) * mask.factor : 0.0f;
        }
      }
      // The old values are loaded only now, to save registers during the draws.
      if (accumulate) {
        const auto old =
            at.vectorized ? load_raw<N>(y + start + c) : load_some<N>(y + start + c, at.cols - c);
#pragma unroll
        for (int n = 0; n < N; ++n) out[n] += element(old, n);
      }
      at.store(y + start, tile, u, to_raw<T>(out));
    }
  }
}

}  // namespace

void dropout(const Dropout& args) {
  dispatch_device(args.x.dtype(), "dropout", [&]<class T>() {
    const T* in = pointer<T>(args.x);
    T* out = pointer<T>(args.y);
    const RowLayout layout =
        row_layout<T>(args.x.dim(0), args.x.dim(1), vectorized_rows(args.x.dim(1), in, out));
    launch("dropout", dropout_kernel<T>, layout.launch_shape(), args.x.device(), out, in,
           DropoutMask<float>(args.spec), args.mode == Grad::kAccumulate, layout);
  });
}

}  // namespace cohort::kernels::cuda
