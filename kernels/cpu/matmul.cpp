// Matmul on the CPU: single-threaded Eigen GEMMs over fixed tiles. Only this file includes Eigen.
//
// Row-major C = op(A) op(B) is the column-major C^T = op(B)^T op(A)^T, so tokens (rows of C) are
// Eigen's columns. Eigen computes columns in panels of four with one order of accumulation, while
// the order down a column depends on the number of rows left. So with the token count padded to
// 16 and fixed tile boundaries along N, the bits of a token's row depend on K and N alone.
#define EIGEN_DONT_PARALLELIZE
// Keeps Eigen from switching to another algorithm for small sizes, which would depend on M.
#define EIGEN_GEMM_TO_COEFFBASED_THRESHOLD 1
// Packed panels up to this size are on the stack: on the heap they would be mapped for every call.
#define EIGEN_STACK_ALLOCATION_LIMIT (1 << 20)
// GCC 12 warns about its own AVX-512 intrinsics when they are inlined from Eigen.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <Eigen/Core>
#include <algorithm>
#include <vector>

#include "core/parallel.h"
#include "core/sizes.h"
#include "kernels/cpu/reduce.h"
#include "kernels/lora.h"
#include "kernels/matmul.h"

namespace cohort::kernels::cpu {
namespace {

constexpr int64_t kRowPad = 16;
// A multiple of the rows of one register tile of Eigen (48, 24 or 12), so that with boundaries here
// every element has the code path that it has in a GEMM without tiles.
constexpr int64_t kColumnUnit = 96;
// Tokens per step of the accumulation in a weight gradient: both packed panels stay in the cache.
constexpr int64_t kTokenStep = 128;

// Below this number of multiply-adds, handing work to threads costs more than it saves.
constexpr int64_t kSerialWork = 1 << 20;

template <class T, int Order>
using View = Eigen::Map<const Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Order>, 0,
                        Eigen::OuterStride<>>;

// The transpose of op(p)[rows, cols]: a [cols, rows] matrix in Eigen's terms.
template <class T, class F>
void with_transposed(const T* p, int64_t ld, Transpose transpose, int64_t rows, int64_t cols,
                     F&& fn) {
  if (transpose == Transpose::kNo)
    fn(View<T, Eigen::ColMajor>(p, cols, rows, Eigen::OuterStride<>(ld)));
  else
    fn(View<T, Eigen::RowMajor>(p, cols, rows, Eigen::OuterStride<>(ld)));
}

// c[m, n] = scale op(a) op(b) in row-major memory, or added to the bias or to c.
template <class T>
struct Operands {
  const T *a, *b, *bias;  // bias: [n] or null, the initial value of c's rows
  T* c;
  int64_t m, k, n;
  int64_t lda, ldb, ldc;  // row strides
  Transpose trans_a, trans_b;
  Grad out;
  T scale = 1;
  int64_t work() const { return m * k * n; }
  const T* b_columns(int64_t column) const {
    return b + (trans_b == Transpose::kNo ? column : column * ldb);
  }
};

// c += scale op(a) op(b), for a part of a product whose c is initialised. Runs in the calling
// thread.
template <class T>
void add_tile(const Operands<T>& t) {
  using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::ColMajor>;
  Eigen::Map<Matrix, 0, Eigen::OuterStride<>> c(t.c, t.n, t.m, Eigen::OuterStride<>(t.ldc));
  with_transposed(t.b, t.ldb, t.trans_b, t.k, t.n, [&](const auto& b) {
    with_transposed(t.a, t.lda, t.trans_a, t.m, t.k,
                    [&](const auto& a) { c.noalias() += t.scale * b * a; });
  });
}

// Initialises the accumulators in rows of c.
template <class T>
void init_rows(const Operands<T>& op, T* c, int64_t ldc, int64_t rows, int64_t column,
               int64_t cols) {
  if (op.out == Grad::kAccumulate) return;
  for (int64_t r = 0; r < rows; ++r) {
    if (op.bias != nullptr)
      std::copy_n(op.bias + column, cols, c + r * ldc);
    else
      std::fill_n(c + r * ldc, cols, T(0));
  }
}

// Rows [row, row + rows) and columns [column, column + cols) of c, a not transposed.
template <class T>
void row_tile(const Operands<T>& op, int64_t row, int64_t rows, int64_t column, int64_t cols) {
  T* c = op.c + row * op.ldc + column;
  const T* a = op.a + row * op.lda;
  init_rows(op, c, op.ldc, rows, column, cols);
  Operands<T> tile = op;
  tile.m = rows;
  tile.n = cols;
  tile.a = a;
  tile.b = op.b_columns(column);
  tile.c = c;
  if (rows % kRowPad == 0) return add_tile(tile);

  tile.m = round_up(rows, kRowPad);
  std::vector<T> padded_a(static_cast<size_t>(tile.m * op.k));
  for (int64_t r = 0; r < rows; ++r) std::copy_n(a + r * op.lda, op.k, padded_a.data() + r * op.k);
  std::vector<T> padded_c(static_cast<size_t>(tile.m * cols));
  for (int64_t r = 0; r < rows; ++r) std::copy_n(c + r * op.ldc, cols, padded_c.data() + r * cols);
  tile.a = padded_a.data();
  tile.lda = op.k;
  tile.c = padded_c.data();
  tile.ldc = cols;
  add_tile(tile);
  for (int64_t r = 0; r < rows; ++r) std::copy_n(padded_c.data() + r * cols, cols, c + r * op.ldc);
}

// One output column: Eigen would use its matrix-vector path, whose order depends on M.
template <class T>
void single_column(const Operands<T>& op) {
  for_rows(op.m, op.k, [&](int64_t r) {
    const T* a = op.a + r * op.lda;
    const int64_t step = op.trans_b == Transpose::kNo ? op.ldb : 1;
    T& c = op.c[r * op.ldc];
    const T start = op.out == Grad::kAccumulate ? c : op.bias != nullptr ? op.bias[0] : T(0);
    c = start + op.scale * lane_sum<T>(op.k, [&](int64_t i) { return a[i] * op.b[i * step]; });
  });
}

// a not transposed: rows are independent. Many rows are split into blocks of rows; few rows are
// bound by the weights, so the columns are split as well.
template <class T>
void matmul_rows(const Operands<T>& op) {
  if (op.n == 1) return single_column(op);
  // Rows are independent, so the split may depend on the number of threads: two blocks per thread,
  // since every block packs the weights.
  const int64_t row_block =
      std::clamp<int64_t>(round_up(op.m / (2 * num_threads()), kRowPad), 64, 384);
  const int64_t column_block = op.m <= 64    ? kColumnUnit
                               : op.m <= 256 ? 2 * kColumnUnit
                                             : round_up(op.n, kColumnUnit);
  // A last block of one column would be a matrix-vector product: it is merged into its neighbour.
  const int64_t column_blocks = std::max<int64_t>(1, (op.n + column_block - 2) / column_block);
  const int64_t row_blocks = ceil_div(op.m, row_block);
  const int64_t tiles = row_blocks * column_blocks;
  parallel_for(tiles, op.work() < kSerialWork ? tiles : 1, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t row = tile / column_blocks * row_block;
      const int64_t column = tile % column_blocks * column_block;
      const bool last = tile % column_blocks == column_blocks - 1;
      row_tile(op, row, std::min(row_block, op.m - row), column,
               last ? op.n - column : column_block);
    }
  });
}

// a transposed: a sum over tokens. The rows of c are split over threads by a function of the shape;
// each block accumulates steps of ascending tokens.
template <class T>
void matmul_over_tokens(const Operands<T>& op) {
  const int64_t block = op.m < 128 ? 32 : std::clamp<int64_t>(round_up(op.m / 4, kRowPad), 64, 256);
  parallel_for(op.m, op.work() < kSerialWork ? op.m : block, [&](int64_t row, int64_t end) {
    T* c = op.c + row * op.ldc;
    init_rows(op, c, op.ldc, end - row, 0, op.n);
    Operands<T> step = op;
    step.m = end - row;
    step.c = c;
    for (int64_t k = 0; k < op.k; k += kTokenStep) {
      step.k = std::min(kTokenStep, op.k - k);
      step.a = op.a + k * op.lda + row;
      step.b = op.b + (op.trans_b == Transpose::kNo ? k * op.ldb : k);
      add_tile(step);
    }
  });
}

// From a row of a matrix, perhaps columns of a wider one, to the next.
int64_t row_stride(const Tensor& t) {
  return RowOffsets(t).outer;
}

template <class T>
void gemm(const Operands<T>& op) {
  if (op.m == 0 || op.n == 0) return;
  if (op.trans_a == Transpose::kNo)
    matmul_rows(op);
  else
    matmul_over_tokens(op);
}

template <class T>
Operands<T> operands(const Matmul& args) {
  const MatmulDesc& desc = args.desc;
  return {.a = args.a.data<T>(),
          .b = args.b.data<T>(),
          .c = args.c.data<T>(),
          .m = args.c.rows(),
          .k = desc.a == Transpose::kYes ? args.a.rows() : args.a.cols(),
          .n = args.c.cols(),
          .lda = row_stride(args.a),
          .ldb = row_stride(args.b),
          .ldc = row_stride(args.c),
          .trans_a = desc.a,
          .trans_b = desc.b,
          .out = desc.out,
          .scale = static_cast<T>(desc.scale)};
}

}  // namespace

void matmul(const Matmul& args) {
  dispatch_float(args.a.dtype(), "matmul", [&]<class T>() { gemm(operands<T>(args)); });
}

// Eigen splits K by its size, so the tail is a product of its own, added to the others' sum.
void linear_forward(const LinearForward& args) {
  dispatch_float(args.x.dtype(), "linear", [&]<class T>() {
    Operands<T> op = operands<T>({args.y, args.x, args.w, {.b = Transpose::kYes}});
    if (args.bias.defined()) op.bias = args.bias.data<T>();
    op.k -= args.tail;
    gemm(op);
    if (args.tail == 0) return;
    op.a += op.k;
    op.b += op.k;
    op.k = args.tail;
    op.out = Grad::kAccumulate;
    gemm(op);
  });
}

void lora_input(const LoraInput& args) {
  const auto& [h, x, a, copy] = args;
  matmul({h, x, a, {.b = Transpose::kYes}});
  if (copy.defined()) Tensor(copy).copy_(h);
}

void select_adapters(const SelectAdapters& args) {
  const int64_t stride = row_stride(args.h), cols = args.h.cols();
  dispatch_float(args.h.dtype(), "select_adapters", [&]<class T>() {
    T* const h = args.h.data<T>();
    for_rows(args.h.rows(), cols, [&](int64_t t) {
      const int32_t row = args.rows.defined() ? args.rows.data<int32_t>()[t] : 0;
      const int64_t adapter = row < 0               ? -1
                              : args.rows.defined() ? args.adapters.data<int32_t>()[row]
                                                    : 0;
      for (int64_t c = 0; c < cols; ++c)
        if (c / args.columns != adapter) h[t * stride + c] = 0;
    });
  });
}

void bias_backward(const BiasBackward& args) {
  const int64_t rows = args.dy.rows(), cols = args.dy.cols();
  dispatch_float(args.dy.dtype(), "bias_backward", [&]<class T>() {
    const T* source = args.dy.data<T>();
    column_sum(args.dbias.tensor.data<T>(), rows, cols, args.dbias.mode,
               [&](int64_t begin, int64_t end, T* partial) {
                 for (int64_t r = begin; r < end; ++r)
                   for (int64_t c = 0; c < cols; ++c) partial[c] += source[r * cols + c];
               });
  });
}

}  // namespace cohort::kernels::cpu
