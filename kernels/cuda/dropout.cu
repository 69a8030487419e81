// Dropout on CUDA: one Philox call serves four neighbouring elements, and they have one thread. The
// draws take as long as the memory, so words are compared as integers, a product replaces the
// division, and blocks are bounded to few registers, so that many of them overlap the two.
#include "kernels/cuda/rows.cuh"
#include "kernels/dropout.h"

namespace cohort::kernels::cuda {
namespace {

// What is the same for every token.
struct DropoutDraws {
  const int64_t* sequences;
  const int32_t* positions;
  uint64_t seed, stream;
  uint32_t first_kept;
  float factor;
};

// A block has one token, or several with few columns; a thread draws for the packs that it moves.
// The words of one Philox call decide over four neighbouring columns, whatever the layout.
template <class T>
__global__ void __launch_bounds__(kMaxGroup, 2)
    dropout_kernel(T* y, const T* x, const DropoutDraws draws, bool accumulate,
                   const RowLayout layout) {
  constexpr int N = RowSlice<T>::N;
  static_assert(N % 4 == 0);
  const RowSlice<T> at(layout);
  if (at.cols == 0) return;
  const int64_t start = at.row * layout.cols;
  typename RowSlice<T>::Packs in;
  at.load(x + start, 0, in);  // on its way before the draws begin
  const uint64_t row_stream =
      dropout_row(draws.stream, draws.sequences[at.row], draws.positions[at.row]);
  for (int tile = 0; tile < layout.tiles; ++tile) {
    // A long row's later tiles: their loads are not ahead of the draws, but other blocks are at
    // work meanwhile.
    if (tile > 0) at.load(x + start, tile, in);
#pragma unroll
    for (int u = 0; u < kRowPacks; ++u) {
      // Packs that lie wholly past the row draw nothing; the last one may reach past it, and is cut
      // when it is stored.
      const int c = at.column(tile, u);
      if (c >= at.cols) continue;
      float out[N];
#pragma unroll
      for (int n = 0; n < N; n += 4) {
        // Address: (seed, token's stream, column / 4). The four words are for columns c + n to c +
        // n + 3.
        const auto bits = philox(draws.seed, row_stream, static_cast<uint32_t>(c + n) / 4);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          // An integer comparison: dropout_first_kept() says which words are not below p.
          const bool keep = bits[static_cast<size_t>(k)] >= draws.first_kept;
          out[n + k] = keep ? element(in[u], n + k) * draws.factor : 0.0f;
        }
      }
      // The old values are read only now: they would hold registers during the draws.
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
    const DropoutDraws draws{.sequences = pointer<int64_t>(args.spec.sequences),
                             .positions = pointer<int32_t>(args.spec.positions),
                             .seed = args.spec.seed,
                             .stream = args.spec.stream,
                             .first_kept = dropout_first_kept(static_cast<float>(args.spec.p)),
                             .factor = static_cast<float>(1 / (1 - args.spec.p))};
    launch("dropout", dropout_kernel<T>, layout.launch_shape(), args.x.device(), out, in, draws,
           args.mode == Grad::kAccumulate, layout);
  });
}

}  // namespace cohort::kernels::cuda
