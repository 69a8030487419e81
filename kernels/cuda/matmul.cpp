// Matmul on CUDA by cuBLASLt, which only this file uses, and for few rows by skinny_gemm.cu.
//
// Exactness: if A is not transposed, the rows of C must not depend on the number of rows.
// cuBLASLt's bf16 tensor core kernels without split-K all accumulate ascending k in the same order,
// so split-K is excluded there. This is verified: before an algorithm is used, its result for
// random matrices is compared with accumulation_order.cu, and algorithms that differ are rejected.
// The kernels for f32 and for rows that are not aligned to 16 bytes differ from each other, so one
// algorithm per weight is used for every number of rows; likewise for bf16 on a GPU whose cuBLASLt
// accumulates in another order. tests/kernels/matmul_cuda_test.cpp tests all of this.
//
// Determinism: the bits of a GEMM depend only on shapes and dtypes. The fastest of the algorithms
// with the same accumulation order is measured at the first GEMM of its size; with another order
// (split-K over many tokens), cuBLASLt's first suggestion is used. Algorithms are selected for the
// rounded-up number of tokens if possible, so that a run with varying batches caches few.
#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <bit>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "core/cuda.h"
#include "core/graph.h"
#include "core/log.h"
#include "core/sizes.h"
#include "kernels/cuda/accumulation_order.h"
#include "kernels/cuda/sm90/skinny_gemm.h"
#include "kernels/matmul.h"

namespace cohort::kernels::cuda {
namespace {

constexpr size_t kWorkspace = size_t{32} << 20;
constexpr int64_t kRowsForAll = 2048;  // one algorithm for any number of rows: that of this many
constexpr int64_t kFewRows = 128;      // bf16: fewer rows use the algorithm for this many
// Size of C in a comparison. An algorithm's order does not depend on the number of rows and
// columns.
constexpr int64_t kComparedRows = 256, kComparedCols = 256;

// True for the status of a lack of memory. Where cuBLASLt fails to load code, it reports another
// failure: with hardly any memory free, that is the cause.
bool lacks_memory(cublasStatus_t status) {
  if (status == CUBLAS_STATUS_ALLOC_FAILED) return true;
  if (status != CUBLAS_STATUS_NOT_INITIALIZED && status != CUBLAS_STATUS_INTERNAL_ERROR &&
      status != CUBLAS_STATUS_EXECUTION_FAILED)
    return false;
  size_t available = 0, total = 0;
  return cudaMemGetInfo(&available, &total) == cudaSuccess && available < kWorkspace;
}

// The status of a call, which is made again once cached blocks are freed if there is too little
// memory for it. Throws OutOfMemoryError if there still is.
template <class Call>
cublasStatus_t with_memory(const char* name, const Call& call) {
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
  const cudaError_t code = ::cohort::cuda::with_memory([&] {
    status = call();
    return lacks_memory(status) ? cudaErrorMemoryAllocation : cudaSuccess;
  });
  if (code != cudaSuccess) ::cohort::cuda::throw_error(code, name, __FILE__, __LINE__);
  return status;
}

void check(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_ALLOC_FAILED)
    ::cohort::cuda::throw_error(cudaErrorMemoryAllocation, call, __FILE__, __LINE__);
  COHORT_CHECK(status == CUBLAS_STATUS_SUCCESS, "[matmul] ", call, ": ",
               cublasLtGetStatusString(status));
}

// Also makes the device current: a handle belongs to the device that is current when it is made,
// and so do cuBLASLt's suggestions.
cublasLtHandle_t handle(Device device) {
  ::cohort::cuda::activate(device);
  static std::array<cublasLtHandle_t, 64> handles{};
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  cublasLtHandle_t& cached = handles.at(static_cast<size_t>(device.index));
  if (cached != nullptr) return cached;
  cublasLtHandle_t made = nullptr;
  check(with_memory("cublasLtCreate", [&] { return cublasLtCreate(&made); }), "cublasLtCreate");
  return cached = made;
}

cudaDataType data_type(DType dtype) {
  return dtype == DType::kBF16 ? CUDA_R_16BF : CUDA_R_32F;
}

// RAII owner of a cuBLASLt descriptor.
template <class T, cublasStatus_t (*kDestroy)(T)>
class Owned : NonCopyable {
 public:
  ~Owned() {
    if (value_ != nullptr) kDestroy(value_);
  }
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
// From a row of a matrix, perhaps columns of a wider one, to the next, in elements.
int64_t row_stride(const Tensor& t) {
  return RowOffsets(t).outer;
}
// Alignment of both the length and the stride of rows.
uint32_t row_alignment(const Tensor& t) {
  return std::min(row_alignment(t.cols(), t.dtype()), row_alignment(row_stride(t), t.dtype()));
}
// Smallest stride of rows of `cols` elements with an alignment that row_alignment() gave for them.
int64_t least_stride(int64_t cols, DType dtype, uint32_t alignment) {
  const auto step = static_cast<int64_t>(alignment / dtype_size(dtype));
  return row_alignment(cols, dtype) == alignment ? cols : cols + step;
}

// An algorithm is selected by the alignment of rows, which the start of a matrix must have too.
void check_operand(const Tensor& t, const char* name) {
  COHORT_CHECK(t.dtype() == DType::kF32 || t.dtype() == DType::kBF16,
               "[matmul] expected f32 or bf16 on a CUDA device, got ", name, " ", t.str());
  if (t.numel() == 0) return;
  const uint32_t alignment = row_alignment(t);
  COHORT_CHECK(reinterpret_cast<uintptr_t>(t.raw()) % alignment == 0, "[matmul] expected ", name,
               " ", t.str(), " to start at a multiple of ", alignment,
               " bytes, as its rows do; hint: clone() it");
}

// Key of the algorithm cache. Of strides it has only the alignments of the rows of a and b: columns
// of a wider matrix get the algorithm of a contiguous matrix.
struct Key {
  int device;
  int64_t m, n, k;
  Transpose a, b;
  uint32_t alignment_a, alignment_b;  // bytes
  DType in, out;
  bool with_bias;
  SplitK split_k;  // kAllowed whenever a is transposed
  auto operator<=>(const Key&) const = default;

  // Columns of a and b as stored, and the smallest strides of their rows.
  int64_t cols_a() const { return a == Transpose::kYes ? m : k; }
  int64_t cols_b() const { return b == Transpose::kYes ? k : n; }
  int64_t stride_a() const { return least_stride(cols_a(), in, alignment_a); }
  int64_t stride_b() const { return least_stride(cols_b(), in, alignment_b); }
};

struct Choice {
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace;
};

// cuBLASLt is column-major: row-major c = op(a) op(b) is c^T = op(b)^T op(a)^T there, so b comes
// first, and each matrix is passed as its transpose.
struct Problem {
  MatmulDescriptor operation;
  Layout a, b, c;

  // Strides of the rows of a and b in elements.
  Problem(const Key& key, int64_t stride_a, int64_t stride_b, const void* bias) {
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
    layout(a, key.a == Transpose::kYes ? key.k : key.m, key.cols_a(), stride_a, key.in);
    layout(b, key.b == Transpose::kYes ? key.n : key.k, key.cols_b(), stride_b, key.in);
    layout(c, key.m, key.n, key.n, key.out);
  }

 private:
  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    check(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value), "describe");
  }
  static void layout(Layout& out, int64_t rows, int64_t cols, int64_t stride, DType dtype) {
    check(cublasLtMatrixLayoutCreate(out.out(), data_type(dtype), static_cast<uint64_t>(cols),
                                     static_cast<uint64_t>(rows), stride),
          "layout");
  }
};

// An algorithm that does not report its split-K setting counts as split.
bool is_unsplit(const cublasLtMatmulAlgo_t& algorithm) {
  int32_t splits = 0;
  size_t written = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoConfigGetAttribute(
      &algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits, sizeof splits, &written);
  return status == CUBLAS_STATUS_SUCCESS && written == sizeof splits && splits == 1;
}

// cuBLASLt's suggestions, best first, without split-K algorithms if those are excluded.
std::vector<Choice> suggestions(const Key& key) {
  const Problem problem(key, key.stride_a(), key.stride_b(), nullptr);
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
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.alignment_b);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.alignment_a);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, row_alignment(key.n, key.out));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, row_alignment(key.n, key.out));
  // The mask does not exclude split-K with a reduction inside a cluster, so each candidate is
  // checked.
  std::array<cublasLtMatmulHeuristicResult_t, 16> results;
  int count = 0;
  const cublasLtHandle_t library = handle(Device::cuda(key.device));
  const cublasStatus_t status = with_memory("cublasLtMatmulAlgoGetHeuristic", [&] {
    return cublasLtMatmulAlgoGetHeuristic(library, problem.operation, problem.b, problem.a,
                                          problem.c, problem.c, preference,
                                          static_cast<int>(results.size()), results.data(), &count);
  });
  std::vector<Choice> out;
  for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < count; ++i) {
    const auto& result = results[static_cast<size_t>(i)];
    if (result.state != CUBLAS_STATUS_SUCCESS) continue;
    if (key.split_k == SplitK::kNever && !is_unsplit(result.algo)) continue;
    out.push_back({result.algo, result.workspaceSize});
  }
  if (!out.empty()) return out;
  throw Error(str("[matmul] cuBLASLt has no algorithm for ", key.m, " x ", key.k, " times ", key.k,
                  " x ", key.n, " in ", dtype_name(key.in), " to ", dtype_name(key.out), ": ",
                  cublasLtGetStatusString(status)));
}

// Matrices of a GEMM; `bias` may be undefined. `scale`: of the product.
struct Operands {
  Tensor& c;
  const Tensor &a, &b, &bias;
  float scale = 1;
};

cublasStatus_t run(const Choice& choice, const Key& key, const Operands& operands, Grad out) {
  const auto& [c, a, b, bias, scale] = operands;
  const Device device = a.device();
  const cudaStream_t queue = ::cohort::cuda::stream(device);
  const Problem problem(key, row_stride(a), row_stride(b), bias.defined() ? bias.raw() : nullptr);
  const float beta = out == Grad::kAccumulate ? 1 : 0;
  Tensor workspace;
  if (choice.workspace > 0)
    workspace = Tensor::empty({static_cast<int64_t>(choice.workspace)}, DType::kU8, device);
  void* const scratch = workspace.defined() ? workspace.raw() : nullptr;
  const cublasLtHandle_t library = handle(device);
  ::cohort::cuda::record_trigger(queue, ::cohort::cuda::Trigger::kLate);
  return with_memory("cublasLtMatmul", [&] {
    return cublasLtMatmul(library, problem.operation, &scale, b.raw(), problem.b, a.raw(),
                          problem.a, &beta, c.raw(), problem.c, c.raw(), problem.c,
                          &choice.algorithm, scratch, choice.workspace, queue);
  });
}

// Compares algorithms with the reference accumulation order on random matrices of the key's
// layouts, with small M and N. Synchronises with the device.
class Comparison {
 public:
  explicit Comparison(Key key) : key_(key), device_(Device::cuda(key.device)) {
    COHORT_CHECK(!::cohort::is_capturing(device_),
                 "[matmul] first GEMM of its kind during graph capture: its algorithm cannot be "
                 "verified; hint: run it once before recording");
    key_.m = kComparedRows;
    key_.n = std::min(key_.n, kComparedCols);
    uint64_t seed = 0;
    const auto random = [&](int64_t rows, int64_t cols, int64_t stride) {
      Tensor out = Tensor::empty({rows, stride}, key_.in, device_);
      fill_for_comparison(out, seed++);
      return out.narrow(1, 0, cols);
    };
    a_ = random(key_.a == Transpose::kYes ? key_.k : key_.m, key_.cols_a(), key_.stride_a());
    b_ = random(key_.b == Transpose::kYes ? key_.n : key_.k, key_.cols_b(), key_.stride_b());
    if (key_.with_bias) bias_ = random(1, key_.n, key_.n).reshape({key_.n});
    c_ = Tensor::empty({key_.m, key_.n}, key_.out, device_);
  }

  bool accumulates_in_order(const Choice& choice) {
    const cublasStatus_t status =
        run(choice, key_, {.c = c_, .a = a_, .b = b_, .bias = bias_}, Grad::kOverwrite);
    if (status != CUBLAS_STATUS_SUCCESS) return false;
    Tensor differing = Tensor::zeros({1}, DType::kI32, device_);
    count_out_of_order({.differing = differing,
                        .c = c_,
                        .a = a_,
                        .b = b_,
                        .bias = bias_,
                        .transpose_a = key_.a,
                        .transpose_b = key_.b});
    return differing.to_vector<int32_t>()[0] == 0;
  }

 private:
  Key key_;
  Device device_;
  Tensor a_, b_, bias_, c_;
};

// The suggestions that accumulate in the reference order, best first.
std::vector<Choice> suggestions_in_order(const Key& key) {
  Comparison comparison(key);
  const std::vector<Choice> all = suggestions(key);
  std::vector<Choice> out;
  std::copy_if(all.begin(), all.end(), std::back_inserter(out),
               [&](const Choice& choice) { return comparison.accumulates_in_order(choice); });
  const size_t refused = all.size() - out.size();
  const auto level = refused > 0 ? logging::Level::kInfo : logging::Level::kDebug;
  logging::write(level, str("[matmul] ", key.m, " x ", key.k, " times ", key.k, " x ", key.n, ": ",
                            refused, " of ", all.size(),
                            " of cuBLASLt's algorithms rejected: another accumulation order"));
  return out;
}

// Measures the time between two points of a stream.
class Stopwatch : NonCopyable {
 public:
  explicit Stopwatch(cudaStream_t queue) : queue_(queue) {
    for (cudaEvent_t& event : events_) COHORT_CUDA_CHECK(cudaEventCreate(&event));
  }
  ~Stopwatch() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  void start() { COHORT_CUDA_CHECK(cudaEventRecord(events_[0], queue_)); }
  float milliseconds() {
    COHORT_CUDA_CHECK(cudaEventRecord(events_[1], queue_));
    COHORT_CUDA_CHECK(cudaEventSynchronize(events_[1]));
    float out = 0;
    COHORT_CUDA_CHECK(cudaEventElapsedTime(&out, events_[0], events_[1]));
    return out;
  }

 private:
  cudaStream_t queue_;
  std::array<cudaEvent_t, 2> events_{};
};

// Fastest of several algorithms with equal bits, measured by GEMMs that overwrite c. An algorithm
// that does not support these operands is skipped. While times of an algorithm differ by more than
// 20 %, other work uses the GPU, or it has throttled: all are timed again, a few times at most.
Choice fastest(const std::vector<Choice>& choices, const Key& key, const Operands& operands) {
  constexpr int kRounds = 4, kMostRounds = 4 * kRounds, kRepeats = 2;  // the first round warms up
  constexpr float kSpread = 1.2f;
  Stopwatch watch(::cohort::cuda::stream(operands.a.device()));
  constexpr float kNotRun = std::numeric_limits<float>::infinity();
  std::vector<float> best(choices.size(), kNotRun);
  bool is_busy = false;
  for (int round = 0; round < kRounds || (is_busy && round < kMostRounds); ++round) {
    if (round % kRounds == 0) is_busy = false;
    for (size_t i = 0; i < choices.size(); ++i) {
      if (round > 0 && best[i] == kNotRun) continue;
      cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
      watch.start();
      for (int repeat = 0; repeat < kRepeats && status == CUBLAS_STATUS_SUCCESS; ++repeat)
        status = run(choices[i], key, operands, Grad::kOverwrite);
      const float time = watch.milliseconds();
      if (status != CUBLAS_STATUS_SUCCESS) continue;
      is_busy |= round > 1 && std::max(time, best[i]) > kSpread * std::min(time, best[i]);
      best[i] = round > 0 ? std::min(best[i], time) : std::numeric_limits<float>::max();
    }
  }
  return choices[static_cast<size_t>(std::min_element(best.begin(), best.end()) - best.begin())];
}

// True if every row of all three matrices is aligned to 16 bytes.
bool has_aligned_rows(const Key& key) {
  return key.alignment_a == 16 && key.alignment_b == 16 && row_alignment(key.n, key.out) == 16;
}

// True if all algorithms without split-K accumulate in the same order.
bool has_one_order(const Key& key) {
  return key.split_k == SplitK::kNever && key.in == DType::kBF16 && has_aligned_rows(key);
}

// Rounds the number of tokens up to one of eight sizes per power of two, so that batches of any
// length share few algorithms.
Key with_rounded_tokens(Key key) {
  int64_t& tokens = key.a == Transpose::kYes ? key.k : key.m;
  const auto step = std::max<int64_t>(1, std::bit_floor(static_cast<uint64_t>(tokens)) / 8);
  tokens = round_up(tokens, step);
  return key;
}

// Process-wide cache of selected and verified algorithms.
class Choices {
 public:
  static Choices& get() {
    static Choices all;
    return all;
  }

  // Algorithm for GEMMs of the sizes of `rounded`. If several have equal bits, they are timed on
  // the first GEMM (`key` and operands) that overwrites c.
  Choice find(Key rounded, const Key& key, const Operands& operands, Grad out) {
    std::lock_guard lock(mutex_);
    std::vector<Choice>& choices = candidates(rounded);
    if (choices.size() > 1 && out == Grad::kOverwrite &&
        !::cohort::is_capturing(operands.a.device()))
      choices = {fastest(choices, key, operands)};
    return choices.front();
  }

  // True if GEMMs with this weight accumulate in the order of accumulation_order.h.
  bool are_in_order(const Key& key) {
    std::lock_guard lock(mutex_);
    return has_one_order(key) && !in_order(key).empty();
  }

 private:
  // Algorithms with equal bits, in cuBLASLt's order of preference.
  std::vector<Choice>& candidates(Key key) {
    if (has_one_order(key)) {
      if (const std::vector<Choice>& any = in_order(key); !any.empty()) {
        key.m = std::max(key.m, kFewRows);
        return remember(choices_, key, [&] {
          std::vector<Choice> out = suggestions_in_order(key);
          return out.empty() ? any : out;
        });
      }
    }
    if (key.split_k == SplitK::kNever) key.m = kRowsForAll;
    return remember(choices_, key, [&]() -> std::vector<Choice> {
      const Choice first = suggestions(key).front();
      Key unsplit = key;
      unsplit.split_k = SplitK::kNever;
      if (is_unsplit(first.algorithm) && has_one_order(unsplit))
        if (std::vector<Choice> out = suggestions_in_order(unsplit); !out.empty()) return out;
      return {first};
    });
  }
  // Algorithms in reference order for any number of rows of the weight. Queried first, so that the
  // result does not depend on the number of rows that occurs first.
  const std::vector<Choice>& in_order(Key key) {
    key.m = kRowsForAll;
    return remember(in_order_, key, [&] { return suggestions_in_order(key); });
  }
  using Known = std::map<Key, std::vector<Choice>>;
  template <class Choose>
  static std::vector<Choice>& remember(Known& known, const Key& key, Choose&& choose) {
    auto it = known.find(key);
    if (it == known.end()) it = known.emplace(key, choose()).first;
    return it->second;
  }

  std::mutex mutex_;
  Known in_order_, choices_;
};

Key key_of(const Operands& operands, const MatmulDesc& desc) {
  const auto& [c, a, b, bias, scale] = operands;
  return {.device = a.device().index,
          .m = c.rows(),
          .n = c.cols(),
          .k = desc.a == Transpose::kYes ? a.rows() : a.cols(),
          .a = desc.a,
          .b = desc.b,
          .alignment_a = row_alignment(a),
          .alignment_b = row_alignment(b),
          .in = a.dtype(),
          .out = c.dtype(),
          .with_bias = bias.defined(),
          .split_k = desc.a == Transpose::kYes ? SplitK::kAllowed : desc.split_k};
}

// c (+)= scale op(a) op(b) + bias. `tail`: as in LinearForward.
void gemm(const Operands& operands, const MatmulDesc& desc, int64_t tail = 0) {
  const auto& [c, a, b, bias, scale] = operands;
  check_operand(a, "a");
  check_operand(b, "b");
  check_operand(c, "c");
  if (bias.defined()) check_operand(bias, "bias");
  const Device device = a.device();
  const Key key = key_of(operands, desc);
  if (key.m == 0 || key.n == 0) return;
  if (key.k == 0) {
    if (desc.out == Grad::kOverwrite) c.zero_();
    return;
  }
  if (desc.out == Grad::kOverwrite && key.b == Transpose::kYes && scale == 1 &&
      is_skinny({key.m, key.n, key.k}, device) && Choices::get().are_in_order(key))
    return skinny_gemm({.y = c, .x = a, .w = b, .bias = bias, .tail = tail});
  const auto run_as = [&](const Key& selected) {
    return run(Choices::get().find(selected, key, operands, desc.out), key, operands, desc.out);
  };
  cublasStatus_t status = run_as(with_rounded_tokens(key));
  // Some algorithms that reduce over tokens support only multiples of a few tokens.
  if (status == CUBLAS_STATUS_INVALID_VALUE || status == CUBLAS_STATUS_NOT_SUPPORTED)
    status = run_as(key);
  check(status, "cublasLtMatmul");
}

}  // namespace

void check_tail(const Tensor& x, int64_t tail) {
  if (tail == 0 || x.numel() == 0) return;
  COHORT_CHECK(
      ::cohort::cuda::last_trigger(::cohort::cuda::stream(x.device())) ==
          ::cohort::cuda::Trigger::kLate,
      "[linear] expected the tail of x to be written right before, by lora_input() or a copy; the "
      "last kernel lets others start before the columns ahead of the tail are complete");
}

void matmul(const Matmul& args) {
  const auto& [c, a, b, desc] = args;
  gemm({.c = c, .a = a, .b = b, .bias = {}, .scale = static_cast<float>(desc.scale)}, desc);
}

// Without the reference order the tail is a product of its own, so that the columns before it have
// the algorithm of the layer without a tail.
void linear_forward(const LinearForward& args) {
  const auto& [y, x, w, bias, tail] = args;
  check_tail(x, tail);
  const MatmulDesc desc{.b = Transpose::kYes};
  const int64_t body = w.dim(1) - tail;
  if (tail == 0 || body == 0 || y.numel() == 0 || linear_accumulates_in_order(x, w, bias))
    return gemm({.c = y, .a = x, .b = w, .bias = bias}, desc, tail);
  const Tensor rows = x.reshape({x.rows(), x.cols()});
  gemm({.c = y, .a = rows.narrow(1, 0, body), .b = w.narrow(1, 0, body), .bias = bias}, desc);
  gemm({.c = y, .a = rows.narrow(1, body, tail), .b = w.narrow(1, body, tail), .bias = {}},
       {.b = Transpose::kYes, .out = Grad::kAccumulate});
}

bool linear_accumulates_in_order(const Tensor& x, const Tensor& w, const Tensor& bias) {
  return Choices::get().are_in_order({.device = x.device().index,
                                      .m = x.rows(),
                                      .n = w.rows(),
                                      .k = w.cols(),
                                      .a = Transpose::kNo,
                                      .b = Transpose::kYes,
                                      .alignment_a = row_alignment(x),
                                      .alignment_b = row_alignment(w),
                                      .in = x.dtype(),
                                      .out = x.dtype(),
                                      .with_bias = bias.defined(),
                                      .split_k = SplitK::kNever});
}

}  // namespace cohort::kernels::cuda
