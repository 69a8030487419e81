// Matrix products on CUDA: by cuBLASLt, which only this file knows; of few rows by skinny.cu.
//
// Exactness: rows of a product whose left factor is not transposed must not depend on how many rows
// there are. cuBLASLt's tensor core kernels for bf16 all add ascending k in the same way as long as
// none splits it, so split-K is excluded there. That is not taken on trust: before an algorithm is
// used, its product of random matrices is compared with product_order.cu, and one that differs is
// passed over.
// The kernels for f32 and for rows that are not aligned to 16 bytes differ among themselves, so
// there one algorithm per weight serves every number of rows; likewise for bf16 on a GPU whose
// cuBLASLt adds in another order. tests/kernels/matmul_cuda_test.cpp holds all of it.
//
// Determinism: the bits of a product are a function of shapes and dtypes alone. Which of the
// algorithms that add in the same order is the fastest is measured at the first product of its
// size; what adds in another order, because it splits a long sum over tokens, is cuBLASLt's first
// suggestion. Algorithms are chosen for the number of tokens rounded up where they can be, so that
// a run whose batches vary remembers few.
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
#include "core/log.h"
#include "core/replay.h"
#include "core/sizes.h"
#include "kernels/cuda/product_order.h"
#include "kernels/cuda/skinny.h"
#include "kernels/matmul.h"

namespace cohort::kernels::cuda {
namespace {

constexpr size_t kWorkspace = size_t{32} << 20;
constexpr int64_t kRowsForAll = 2048;  // where one algorithm serves all, it is that of this many
constexpr int64_t kFewRows = 128;      // bf16: fewer rows use the algorithm of this many
// What an algorithm is compared on: it adds in one way, however many rows and columns there are.
constexpr int64_t kComparedRows = 256, kComparedCols = 256;

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

// What cuBLASLt suggests, the best first, without what splits k where that is excluded.
std::vector<Choice> suggestions(const Key& key) {
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

// The matrices of a product; `bias` may be undefined.
struct Operands {
  Tensor& c;
  const Tensor &a, &b, &bias;
};

cublasStatus_t run(const Choice& choice, const Key& key, const Operands& operands, Grad out) {
  const auto& [c, a, b, bias] = operands;
  const Device device = a.device();
  const cudaStream_t queue = ::cohort::cuda::stream(device);
  const Problem problem(key, bias.defined() ? bias.raw() : nullptr);
  const float alpha = 1, beta = out == Grad::kAccumulate ? 1 : 0;
  Tensor workspace;
  if (choice.workspace > 0)
    workspace = Tensor::empty({static_cast<int64_t>(choice.workspace)}, DType::kU8, device);
  return cublasLtMatmul(handle(device), problem.operation, &alpha, b.raw(), problem.b, a.raw(),
                        problem.a, &beta, c.raw(), problem.c, c.raw(), problem.c, &choice.algorithm,
                        workspace.defined() ? workspace.raw() : nullptr, choice.workspace, queue);
}

// Random matrices of the key's layouts, small in M and N, on which algorithms are compared with the
// order that products are defined by. Waits for the device.
class Comparison {
 public:
  explicit Comparison(Key key) : key_(key), device_(Device::cuda(key.device)) {
    COHORT_CHECK(!::cohort::is_recording(device_),
                 "[matmul] a product is recorded before it was done once: its algorithm cannot be "
                 "compared now");
    key_.m = kComparedRows;
    key_.n = std::min(key_.n, kComparedCols);
    uint64_t seed = 0;
    const auto random = [&](int64_t rows, int64_t cols, Transpose t) {
      if (t == Transpose::kYes) std::swap(rows, cols);
      Tensor out = Tensor::empty({rows, cols}, key_.in, device_);
      fill_for_comparison(out, seed++);
      return out;
    };
    a_ = random(key_.m, key_.k, key_.a);
    b_ = random(key_.k, key_.n, key_.b);
    if (key_.with_bias) bias_ = random(1, key_.n, Transpose::kNo).reshape({key_.n});
    c_ = Tensor::empty({key_.m, key_.n}, key_.out, device_);
  }

  bool adds_in_order(const Choice& choice) {
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

// The suggestions that add in order, the best first.
std::vector<Choice> suggestions_in_order(const Key& key) {
  Comparison comparison(key);
  const std::vector<Choice> all = suggestions(key);
  std::vector<Choice> out;
  std::copy_if(all.begin(), all.end(), std::back_inserter(out),
               [&](const Choice& choice) { return comparison.adds_in_order(choice); });
  const size_t refused = all.size() - out.size();
  const auto say = refused > 0 ? logging::Level::kInfo : logging::Level::kDebug;
  logging::write(
      say, str("[matmul] ", key.m, " x ", key.k, " times ", key.k, " x ", key.n, ": ", refused,
               " of ", all.size(), " of cuBLASLt's algorithms do not add in order"));
  return out;
}

// A stretch of a stream, timed.
class Stopwatch {
 public:
  explicit Stopwatch(cudaStream_t queue) : queue_(queue) {
    for (cudaEvent_t& event : events_) COHORT_CUDA_CHECK(cudaEventCreate(&event));
  }
  ~Stopwatch() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
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

// The fastest of several algorithms with equal bits, by products that overwrite c. An algorithm
// that does not take these operands is no candidate.
Choice fastest(const std::vector<Choice>& choices, const Key& key, const Operands& operands) {
  constexpr int kRounds = 4, kRepeats = 2;  // the first round warms up
  Stopwatch watch(::cohort::cuda::stream(operands.a.device()));
  constexpr float kNotRun = std::numeric_limits<float>::infinity();
  std::vector<float> best(choices.size(), kNotRun);
  for (int round = 0; round < kRounds; ++round)
    for (size_t i = 0; i < choices.size(); ++i) {
      if (round > 0 && best[i] == kNotRun) continue;
      cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
      watch.start();
      for (int repeat = 0; repeat < kRepeats && status == CUBLAS_STATUS_SUCCESS; ++repeat)
        status = run(choices[i], key, operands, Grad::kOverwrite);
      const float time = watch.milliseconds();
      if (status == CUBLAS_STATUS_SUCCESS)
        best[i] = round > 0 ? std::min(best[i], time) : std::numeric_limits<float>::max();
    }
  return choices[static_cast<size_t>(std::min_element(best.begin(), best.end()) - best.begin())];
}

// True if every row of all three matrices may be read 16 bytes at a time.
bool rows_of_16_bytes(const Key& key) {
  return row_alignment(key.a == Transpose::kYes ? key.m : key.k, key.in) == 16 &&
         row_alignment(key.b == Transpose::kYes ? key.k : key.n, key.in) == 16 &&
         row_alignment(key.n, key.out) == 16;
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

// The algorithms that the process has chosen and compared, each once.
class Choices {
 public:
  static Choices& get() {
    static Choices all;
    return all;
  }

  // The algorithm for products of `chosen`'s sizes. Several with equal bits are compared by time in
  // the first product of `key`, which is at hand, that overwrites c.
  Choice find(Key chosen, const Key& key, const Operands& operands, Grad out) {
    std::lock_guard lock(mutex_);
    std::vector<Choice>& choices = candidates(chosen);
    if (choices.size() > 1 && out == Grad::kOverwrite &&
        !::cohort::is_recording(operands.a.device()))
      choices = {fastest(choices, key, operands)};
    return choices.front();
  }

  // Whether the weight's products are summed in the order of product_order.h.
  bool are_in_order(const Key& key) {
    std::lock_guard lock(mutex_);
    return has_one_order(key) && !in_order(key).empty();
  }

 private:
  // Algorithms with equal bits, the best guess first.
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
  // Algorithms in order for the weight of any number of rows. They are asked for first, so that the
  // answer does not depend on which number of rows comes first.
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
  if (desc.out == Grad::kOverwrite && key.b == Transpose::kYes &&
      is_skinny({key.m, key.n, key.k}, device) && Choices::get().are_in_order(key))
    return skinny_product({.y = c, .x = a, .w = b, .bias = bias});
  const Operands operands{.c = c, .a = a, .b = b, .bias = bias};
  const auto run_as = [&](const Key& chosen) {
    return run(Choices::get().find(chosen, key, operands, desc.out), key, operands, desc.out);
  };
  cublasStatus_t status = run_as(with_rounded_tokens(key));
  // Some algorithms that sum over tokens take multiples of a few of them only.
  if (status == CUBLAS_STATUS_INVALID_VALUE || status == CUBLAS_STATUS_NOT_SUPPORTED)
    status = run_as(key);
  check(status, "cublasLtMatmul");
}

}  // namespace

void matmul(const Matmul& args) {
  product(args.c, args.a, args.b, {}, args.desc);
}

void linear_forward(const LinearForward& args) {
  product(args.y, args.x, args.w, args.bias, {.b = Transpose::kYes});
}

bool linear_adds_in_order(const Tensor& x, const Tensor& w, const Tensor& bias) {
  return Choices::get().are_in_order({.device = x.device().index,
                                      .m = x.rows(),
                                      .n = w.rows(),
                                      .k = w.cols(),
                                      .a = Transpose::kNo,
                                      .b = Transpose::kYes,
                                      .in = x.dtype(),
                                      .out = x.dtype(),
                                      .with_bias = bias.defined(),
                                      .split_k = SplitK::kNever});
}

}  // namespace cohort::kernels::cuda
