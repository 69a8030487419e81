// Test utilities: unexpected warnings as failures, optional data, temporary folders, threads,
// random tensors.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "core/parallel.h"
#include "core/tensor.h"

namespace cohort {
// Used by GoogleTest's messages.
inline void PrintTo(DType dtype, std::ostream* out) {
  *out << dtype_name(dtype);
}

// The purpose of rng_stream() for random test data.
inline constexpr uint64_t kTestPurpose = 6;
}  // namespace cohort

namespace cohort::test {

// Records warnings and errors per test and fails a test with an unexpected one.
class LogListener : public testing::EmptyTestEventListener {
 public:
  void OnTestStart(const testing::TestInfo&) override;
  void OnTestEnd(const testing::TestInfo&) override;
};

// Expects at least one warning or error that contains `text` during its lifetime.
class ExpectLog {
 public:
  explicit ExpectLog(std::string text);
  ~ExpectLog();
  ExpectLog(const ExpectLog&) = delete;
  ExpectLog& operator=(const ExpectLog&) = delete;

 private:
  std::string text_;
};

// Folder of real data: $COHORT_TEST_DATA, else ../shared/data next to the source tree; "" if
// absent. With COHORT_REQUIRE containing "data", absence is a test failure.
std::string data_dir();
#define COHORT_REQUIRE_DATA(dir)                      \
  const std::string dir = ::cohort::test::data_dir(); \
  if (dir.empty()) GTEST_SKIP() << "no data folder: set COHORT_TEST_DATA to run this test"

// Number of CUDA devices that tests may use. With COHORT_REQUIRE containing "gpu", fewer than
// `wanted` is a test failure.
int usable_gpus(int wanted);
// Declares `const Device device`, or skips the test without a GPU.
#define COHORT_REQUIRE_GPU(device)                                               \
  if (::cohort::test::usable_gpus(1) < 1) GTEST_SKIP() << "needs a CUDA device"; \
  [[maybe_unused]] const ::cohort::Device device = ::cohort::Device::cuda(0)
// Skips the test if there are fewer than `n` GPUs (COHORT_REQUIRE: "multi-gpu").
#define COHORT_REQUIRE_GPUS(n) \
  if (::cohort::test::usable_gpus(n) < (n)) GTEST_SKIP() << "needs " << (n) << " CUDA devices"

// A temporary folder, removed on destruction.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  std::string path(const std::string& name = "") const { return (root_ / name).string(); }

 private:
  std::filesystem::path root_;
};

// Sets num_threads() of this thread for its lifetime.
class Threads {
 public:
  explicit Threads(int n) : previous_(num_threads()) { set_num_threads(n); }
  ~Threads() { set_num_threads(previous_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int previous_;
};

// Standard normal elements times `scale`, reproducible from `seed`.
Tensor random_tensor(const Shape& shape, DType dtype, uint64_t seed, double scale = 1);

// True if shapes, dtypes and every byte agree.
bool bit_equal(const Tensor& a, const Tensor& b);
// Frobenius norm.
double norm(const Tensor& t);
// |a - b| / |b| in the Frobenius norm; |a| if b is zero.
double relative_error(const Tensor& a, const Tensor& b);

void write_file(const std::string& path, const std::string& text);
std::string read_file(const std::string& path);

// Expects `statement` to throw ErrorType with a message that contains `text`.
#define EXPECT_THROW_WITH(statement, ErrorType, text)                                          \
  try {                                                                                        \
    statement;                                                                                 \
    ADD_FAILURE() << "expected " #ErrorType " from " #statement;                               \
  } catch (const ErrorType& e) {                                                               \
    EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << "message: " << e.what(); \
  }

}  // namespace cohort::test
