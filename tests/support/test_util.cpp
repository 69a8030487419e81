#include "tests/support/test_util.h"

#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <sstream>

#include "core/log.h"
#include "core/rng.h"

namespace cohort::test {
namespace {

struct Record {
  std::mutex mutex;
  std::vector<std::string> messages;
};
Record& record() {
  static Record* r = new Record;
  return *r;
}

}  // namespace

void LogListener::OnTestStart(const testing::TestInfo&) {
  {
    std::lock_guard lock(record().mutex);
    record().messages.clear();
  }
  logging::set_observer([](logging::Level level, const std::string& message) {
    if (level < logging::Level::kWarn) return;
    std::lock_guard lock(record().mutex);
    record().messages.push_back(message);
  });
}

void LogListener::OnTestEnd(const testing::TestInfo&) {
  logging::set_observer({});
  std::lock_guard lock(record().mutex);
  for (const std::string& message : record().messages)
    ADD_FAILURE() << "unexpected warning in the log: " << message;
}

ExpectLog::ExpectLog(std::string text) : text_(std::move(text)) {}

ExpectLog::~ExpectLog() {
  std::lock_guard lock(record().mutex);
  const size_t removed = std::erase_if(
      record().messages, [&](const std::string& m) { return m.find(text_) != std::string::npos; });
  EXPECT_GT(removed, 0u) << "expected a warning with '" << text_ << "'";
}

std::string data_dir() {
  if (const char* dir = std::getenv("COHORT_TEST_DATA"); dir != nullptr && *dir != '\0') {
    if (std::filesystem::is_directory(dir)) return dir;
  } else {
    const auto source = std::filesystem::path(__FILE__).parent_path().parent_path().parent_path();
    const auto candidate = source.parent_path() / "shared" / "data";
    if (std::filesystem::is_directory(candidate)) return candidate.string();
  }
  const char* require = std::getenv("COHORT_REQUIRE");
  if (require != nullptr && std::string(require).find("data") != std::string::npos)
    ADD_FAILURE() << "COHORT_REQUIRE asks for the data folder, which is absent";
  return "";
}

int usable_gpus(int wanted) {
  const int count = cuda_device_count();
  const char* setting = std::getenv("COHORT_REQUIRE");
  const std::string require = setting != nullptr ? setting : "";
  const bool required = wanted == 1 ? require.find("gpu") != std::string::npos
                                    : require.find("multi-gpu") != std::string::npos;
  if (required && count < wanted)
    ADD_FAILURE() << "COHORT_REQUIRE asks for " << wanted << " CUDA devices, there are " << count;
  return count;
}

TempDir::TempDir() {
  std::string pattern = (std::filesystem::temp_directory_path() / "cohort-test-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) throw Error("cannot create a temporary folder");
  root_ = pattern;
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(root_, ignored);
}

Tensor random_tensor(const Shape& shape, DType dtype, uint64_t seed, double scale) {
  Rng rng(seed, rng_stream(kTestPurpose));
  std::vector<double> values(static_cast<size_t>(shape.numel()));
  for (double& v : values) v = rng.normal() * scale;
  return Tensor::from(values, shape).to(dtype);
}

bool bit_equal(const Tensor& a, const Tensor& b) {
  if (a.shape() != b.shape() || a.dtype() != b.dtype()) return false;
  const Tensor x = a.contiguous().to(Device{}), y = b.contiguous().to(Device{});
  return x.numel() == 0 || std::memcmp(x.raw(), y.raw(), static_cast<size_t>(x.nbytes())) == 0;
}

double norm(const Tensor& t) {
  double sum = 0;
  for (const double v : t.to_vector<double>()) sum += v * v;
  return std::sqrt(sum);
}

double relative_error(const Tensor& a, const Tensor& b) {
  if (a.shape() != b.shape()) return INFINITY;
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  double difference = 0, norm = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    difference += (x[i] - y[i]) * (x[i] - y[i]);
    norm += y[i] * y[i];
  }
  return std::sqrt(difference) / (norm > 0 ? std::sqrt(norm) : 1);
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  if (!out.flush()) throw Error("cannot write " + path);
}

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

}  // namespace cohort::test
