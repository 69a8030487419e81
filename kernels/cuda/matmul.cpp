// Matrix products on CUDA by cuBLASLt, the only file that knows it; those of few rows by skinny.cu.
//
// Exactness: rows of a product whose left factor is not transposed must not depend on how many rows
// there are. cuBLASLt's tensor core kernels for bf16 all add ascending k in the same way as long as
// none splits it, so split-K is excluded there; one kernel for very few rows is an exception, which
// asking for the algorithm of few_rows() rows avoids. The kernels for f32 and for rows that are not
// aligned to 16 bytes differ among themselves, so there one algorithm per weight serves every
// number of rows. tests/kernels/matmul_cuda_test.cpp holds all of it.
//
// Determinism: an algorithm is a function of shapes and dtypes alone; nothing is timed. It is
// chosen for the number of tokens rounded up where it can be, so that a run whose batches vary
// remembers few.
#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <mutex>

#include "core/cuda.h"
#include "core/sizes.h"
#include "kernels/cuda/skinny.h"
#include "kernels/matmul.h"

namespace cohort::kernels::cuda {
namespace {

constexpr size_t kWorkspace = size_t{32} << 20;
constexpr int64_t kRowsForAll = 2048;  // f32: every number of rows uses the algorithm of this many

void check(cublasStatus_t status, const char* what) {
  COHORT_CHECK(status == CUBLAS_STATUS_SUCCESS, "[matmul] ", what, ": ",
               cublasLtGetStatusString(status));
}

cublasLtHandle_t handle(Device device) {
  static std::array<cublasLtHandle_t, 64> handles{};
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  cublasLtHandle_t& one = handles.at(static_cast<size_t>(device.index));
  if (one == nullptr) check(cublasLtCreate(&one), "cublasLtCreate");
  return one;
}

cudaDataType data_type(DType dtype) {
  return dtype == DType::kBF16 ? CUDA_R_16BF : CUDA_R_32F;
}

// A cuBLASLt descriptor that goes with its scope.
template <class T, cublasStatus_t (*kDestroy)(T)>
class Owned {
 public:
  Owned() = default;
  ~Owned() {
    if (value_ != nullptr) kDestroy(value_);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  T* out() { return &value_; }
  operator T() const { return value_; }

 private:
  T value_ = nullptr;
};
using MatmulDescriptor = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

// Largest power of two up to 16 that divides every row of `cols` elements of `dtype`.
uint32_t row_alignment(int64_t cols, DType dtype) {
  const int64_t bytes = cols * static_cast<int64_t>(dtype_size(dtype));
  return static_cast<uint32_t>(std::min<int64_t>(bytes & -bytes, 16));
}

// An algorithm is chosen for the length of rows, so a matrix has to start where its rows may.
void check_operand(const Tensor& t, const char* name) {
  COHORT_CHECK(t.dtype() == DType::kF32 || t.dtype() == DType::kBF16,
               "[matmul] expected f32 or bf16 on a CUDA device, got ", name, " ", t.str());
  if (t.numel() == 0) return;
  const uint32_t alignment = row_alignment(t.cols(), t.dtype());
  COHORT_CHECK(reinterpret_cast<uintptr_t>(t.raw()) % alignment == 0, "[matmul] expected ", name,
               " ", t.str(), " to start at a multiple of ", alignment,
               " bytes, as its rows do; hint: clone() it");
}

// What an algorithm depends on.
struct Key {
  int device;
  int64_t m, n, k;
  Transpose a, b;
  DType in, out;
  bool with_bias;
  SplitK split_k;  // kAllowed wherever a is transposed
  auto operator<=>(const Key&) const = default;
};

struct Choice {
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace;
};

// cuBLASLt thinks in columns: our row-major c = op(a) op(b) is its c^T = op(b)^T op(a)^T, so b
// comes first and each of our matrices is its own transpose there.
struct Problem {
  MatmulDescriptor operation;
  Layout a, b, c;

  Problem(const Key& key, const void* bias) {
    check(cublasLtMatmulDescCreate(operation.out(), CUBLAS_COMPUTE_32F, CUDA_R_32F), "create");
    const auto transposed = [](Transpose t) {
      return t == Transpose::kYes ? CUBLAS_OP_T : CUBLAS_OP_N;
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, transposed(key.b));
    set(CUBLASLT_MATMUL_DESC_TRANSB, transposed(key.a));
    if (key.with_bias) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(key.in));
    }
    layout(a, key.a == Transpose::kYes ? key.k : key.m, key.a == Transpose::kYes ? key.m : key.k,
           key.in);
    layout(b, key.b == Transpose::kYes ? key.n : key.k, key.b == Transpose::kYes ? key.k : key.n,
           key.in);
    layout(c, key.m, key.n, key.out);
  }

 private:
  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    check(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value), "describe");
  }
  static void layout(Layout& out, int64_t rows, int64_t cols, DType dtype) {
    check(cublasLtMatrixLayoutCreate(out.out(), data_type(dtype), static_cast<uint64_t>(cols),
                                     static_cast<uint64_t>(rows), cols),
          "layout");
  }
};

// What does not say how it sums counts as split.
bool is_unsplit(const cublasLtMatmulAlgo_t& algorithm) {
  int32_t parts = 0;
  size_t written = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoConfigGetAttribute(
      &algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &parts, sizeof parts, &written);
  return status == CUBLAS_STATUS_SUCCESS && written == sizeof parts && parts == 1;
}

Choice choose(const Key& key) {
  const Problem problem(key, nullptr);
  Preference preference;
  check(cublasLtMatmulPreferenceCreate(preference.out()), "preference");
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value),
          "preference");
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspace);
  const uint32_t reductions =
      key.split_k == SplitK::kNever
          ? CUBLASLT_REDUCTION_SCHEME_NONE
          : CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
  const int64_t cols_a = key.a == Transpose::kYes ? key.m : key.k;
  const int64_t cols_b = key.b == Transpose::kYes ? key.k : key.n;
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, row_alignment(cols_b, key.in));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, row_alignment(cols_a, key.in));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, row_alignment(key.n, key.out));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, row_alignment(key.n, key.out));
  // An algorithm that splits k would still do so with the reduction inside a cluster; the mask
  // above does not cover that, so it is looked for in each candidate.
  std::array<cublasLtMatmulHeuristicResult_t, 16> results;
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      handle(Device::cuda(key.device)), problem.operation, problem.b, problem.a, problem.c,
      problem.c, preference, static_cast<int>(results.size()), results.data(), &count);
  for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < count; ++i) {
    const auto& result = results[static_cast<size_t>(i)];
    if (result.state != CUBLAS_STATUS_SUCCESS) continue;
    if (key.split_k == SplitK::kNever && !is_unsplit(result.algo)) continue;
    return {result.algo, result.workspaceSize};
  }
  throw Error(str("[matmul] cuBLASLt has no algorithm for ", key.m, " x ", key.k, " times ", key.k,
                  " x ", key.n, " in ", dtype_name(key.in), " to ", dtype_name(key.out), ": ",
                  cublasLtGetStatusString(status)));
}

// True if every row of all three matrices may be read 16 bytes at a time.
bool rows_of_16_bytes(const Key& key) {
  return row_alignment(key.k, key.in) == 16 && row_alignment(key.n, key.out) == 16 &&
         (key.b == Transpose::kYes || row_alignment(key.n, key.in) == 16);
}

// True for products that every algorithm without split-K adds up in the same order.
bool has_one_order(const Key& key) {
  return key.split_k == SplitK::kNever && key.in == DType::kBF16 && rows_of_16_bytes(key);
}

// The same with the number of tokens rounded up to one of eight sizes per power of two: batches of
// any length share few algorithms.
Key with_rounded_tokens(Key key) {
  int64_t& tokens = key.a == Transpose::kYes ? key.k : key.m;
  const auto step = std::max<int64_t>(1, std::bit_floor(static_cast<uint64_t>(tokens)) / 8);
  tokens = round_up(tokens, step);
  return key;
}

// bf16: fewer rows use the algorithm of this many. For 128 rows of narrow products with a long K
// cuBLASLt 13 suggests a kernel that is ten times slower than that for 256 (896 x 4,864 on an H200:
// 114 us against 10), for wide ones the other way round by up to 1.5.
int64_t few_rows(const Key& key) {
  constexpr int64_t kNarrow = 2048;
  return key.n <= kNarrow ? 256 : 128;
}

const Choice& cached_choice(Key key) {
  if (key.split_k == SplitK::kNever)
    key.m = has_one_order(key) ? std::max(key.m, few_rows(key)) : kRowsForAll;
  static std::map<Key, Choice> choices;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  auto it = choices.find(key);
  if (it == choices.end()) it = choices.emplace(key, choose(key)).first;
  return it->second;
}

// c (+)= op(a) op(b) + bias; `bias` may be undefined.
void product(Tensor& c, const Tensor& a, const Tensor& b, const Tensor& bias,
             const MatmulDesc& desc) {
  check_operand(a, "a");
  check_operand(b, "b");
  check_operand(c, "c");
  if (bias.defined()) check_operand(bias, "bias");
  const Device device = a.device();
  const Key key{.device = device.index,
                .m = c.rows(),
                .n = c.cols(),
                .k = desc.a == Transpose::kYes ? a.rows() : a.cols(),
                .a = desc.a,
                .b = desc.b,
                .in = a.dtype(),
                .out = c.dtype(),
                .with_bias = bias.defined(),
                .split_k = desc.a == Transpose::kYes ? SplitK::kAllowed : desc.split_k};
  if (key.m == 0 || key.n == 0) return;
  if (key.k == 0) {
    if (desc.out == Grad::kOverwrite) c.zero_();
    return;
  }
  if (desc.out == Grad::kOverwrite && key.b == Transpose::kYes && has_one_order(key) &&
      is_skinny({key.m, key.n, key.k}, device))
    return skinny_product({.y = c, .x = a, .w = b, .bias = bias});
  const cudaStream_t queue = ::cohort::cuda::stream(device);
  const Problem problem(key, bias.defined() ? bias.raw() : nullptr);
  const float alpha = 1, beta = desc.out == Grad::kAccumulate ? 1 : 0;
  const auto run = [&](const Choice& choice) {
    Tensor workspace;
    if (choice.workspace > 0)
      workspace = Tensor::empty({static_cast<int64_t>(choice.workspace)}, DType::kU8, device);
    return cublasLtMatmul(handle(device), problem.operation, &alpha, b.raw(), problem.b, a.raw(),
                          problem.a, &beta, c.raw(), problem.c, c.raw(), problem.c,
                          &choice.algorithm, workspace.defined() ? workspace.raw() : nullptr,
                          choice.workspace, queue);
  };
  cublasStatus_t status = run(cached_choice(with_rounded_tokens(key)));
  // Some algorithms that sum over tokens take multiples of a few of them only.
  if (status == CUBLAS_STATUS_INVALID_VALUE || status == CUBLAS_STATUS_NOT_SUPPORTED)
    status = run(cached_choice(key));
  check(status, "cublasLtMatmul");
}

}  // namespace

void matmul(const Matmul& args) {
  product(args.c, args.a, args.b, {}, args.desc);
}

void linear_forward(const LinearForward& args) {
  product(args.y, args.x, args.w, args.bias, {.b = Transpose::kYes});
}

}  // namespace cohort::kernels::cuda
