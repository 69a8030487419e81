// Optimisation ladders of kernels (ladder/): each rung is checked on small shapes, then timed
// against a peer: GEMMs against kernels::matmul() of the same shape (cuBLASLt), softmaxes against a
// copy of the same number of bytes. Bursts of launches of both alternate with pauses, so that both
// run at the same clocks. Random data.
//
//   cohort_bench_ladder --size 8192
//   cohort_bench_ladder --filter matmul_wgmma
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <iostream>
#include <iterator>
#include <limits>
#include <thread>

#include "bench/ladder/ladder.h"
#include "bench/timing.h"
#include "core/parallel.h"
#include "core/rng.h"
#include "kernels/matmul.h"

namespace {

using namespace cohort;
using namespace cohort::bench::ladder;

constexpr double kGemmTolerance = 1e-3, kSoftmaxTolerance = 1e-5;

struct GemmRung {
  const char* name;
  void (*run)(const Gemm&);
  bool hopper = false;
};
constexpr GemmRung kGemms[] = {{"matmul_naive", matmul_naive},
                               {"matmul_shared", matmul_shared},
                               {"matmul_registers", matmul_registers},
                               {"matmul_mma", matmul_mma},
                               {"matmul_wgmma", matmul_wgmma, true}};
struct SoftmaxRung {
  const char* name;
  void (*run)(const Softmax&);
  int64_t columns = std::numeric_limits<int64_t>::max();  // at most
};
constexpr SoftmaxRung kSoftmaxes[] = {{"softmax_naive", softmax_naive},
                                      {"softmax_online", softmax_online},
                                      {"softmax_warp", softmax_warp, kWarpColumns},
                                      {"softmax_block", softmax_block, kBlockColumns}};

// Uniform in [-scale, scale).
Tensor random(const Shape& shape, DType dtype, Device device, float scale = 1) {
  static uint64_t number = 0;
  const uint64_t stream = rng_stream(kBenchPurpose, ++number);
  Tensor t = Tensor::empty(shape, DType::kF32);
  float* const values = t.data<float>();
  parallel_for((t.numel() + 3) / 4, 1 << 12, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto words = philox(1, stream, static_cast<uint64_t>(i));
      for (int64_t j = 4 * i; j < std::min(4 * i + 4, t.numel()); ++j)
        values[j] = scale * (2 * uniform_f32(words[static_cast<size_t>(j % 4)]) - 1);
    }
  });
  return t.to(device).to(dtype);
}
// NaN reveals elements that a kernel does not write.
Tensor unwritten(const Shape& shape, DType dtype, Device device) {
  return Tensor::full(shape, std::numeric_limits<double>::quiet_NaN(), dtype, device);
}

// Distance of two results relative to the norm of `expected`; NaN if either contains NaN.
double relative_error(const std::vector<double>& found, const std::vector<double>& expected) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    difference += (found[i] - expected[i]) * (found[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(difference / norm);
}

// The larger of two errors, where NaN is the largest.
double worse(double a, double b) {
  return std::isnan(a) || a > b ? a : b;
}

// Largest error on shapes with partial tiles, one of which has more tiles than a GPU has
// multiprocessors.
double gemm_error(const GemmRung& rung, Device device) {
  double worst = 0;
  for (const auto& [m, n, k] :
       {std::array<int64_t, 3>{328, 520, 200}, {8, 8, 8}, {2056, 4104, 136}}) {
    const Tensor a = random({m, k}, DType::kBF16, device), b = random({n, k}, DType::kBF16, device);
    Tensor c = unwritten({m, n}, DType::kBF16, device), expected = Tensor::empty_like(c);
    rung.run({c, a, b});
    kernels::matmul({expected, a, b, {.b = kernels::Transpose::kYes}});
    const double error = relative_error(c.to_vector<double>(), expected.to_vector<double>());
    worst = worse(worst, error);
  }
  return worst;
}
double softmax_error(const SoftmaxRung& rung, Device device) {
  constexpr int64_t kRows = 37;
  double worst = 0;
  for (const int64_t cols : {4, 100, 1028, 6000}) {
    if (cols > rung.columns) continue;
    const Tensor x = random({kRows, cols}, DType::kF32, device, 10);
    Tensor y = unwritten(x.shape(), DType::kF32, device);
    rung.run({y, x});
    std::vector<double> expected = x.to_vector<double>();
    for (auto row = expected.begin(); row != expected.end(); row += cols) {
      const double largest = *std::max_element(row, row + cols);
      double sum = 0;
      std::for_each(row, row + cols, [&](double& v) { sum += v = std::exp(v - largest); });
      std::for_each(row, row + cols, [&](double& v) { v /= sum; });
    }
    const double error = relative_error(y.to_vector<double>(), expected);
    worst = worse(worst, error);
  }
  return worst;
}

// Median seconds per launch.
struct Times {
  double rung, peer;
};
Times time_interleaved(Device device, const std::function<void()>& rung,
                       const std::function<void()>& peer) {
  using Clock = std::chrono::steady_clock;
  const auto seconds = [&](const std::function<void()>& call, int launches) {
    synchronize(device);
    const auto begin = Clock::now();
    for (int i = 0; i < launches; ++i) call();
    synchronize(device);
    return std::chrono::duration<double>(Clock::now() - begin).count() / launches;
  };
  // The first launch warms up. Slow rungs use fewer launches; bursts of fast ones last a few
  // milliseconds.
  const auto launches = [&](const std::function<void()>& call) {
    seconds(call, 1);
    const double once = seconds(call, 1);
    return once > 0.05 ? 1 : std::clamp(static_cast<int>(5e-3 / once), 20, 1000);
  };
  const int rung_launches = launches(rung), peer_launches = launches(peer);
  const int rounds = rung_launches == 1 ? 3 : 9;
  std::vector<double> rung_seconds, peer_seconds;
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(30)); };
  for (int round = 0; round < rounds; ++round) {
    pause();
    rung_seconds.push_back(seconds(rung, rung_launches));
    pause();
    peer_seconds.push_back(seconds(peer, peer_launches));
  }
  return {bench::median(rung_seconds), bench::median(peer_seconds)};
}

// Prints a line of the table; returns false if the results are wrong. `work`: bytes or FLOPs per
// launch.
bool print_row(const char* name, const std::string& shape, double error, double tolerance,
               const Times& times, double work, double unit) {
  const bool correct = error <= tolerance;
  std::printf("%-18s %-22s %12.1f %10.1f %9.1f %8.3f   %.1e%s\n", name, shape.c_str(),
              times.rung * 1e6, work / times.rung / unit, work / times.peer / unit,
              times.peer / times.rung, error, correct ? "" : " WRONG");
  std::fflush(stdout);
  return correct;
}

// Rungs whose name contains `filter`.
template <class Rung, size_t kN>
std::vector<Rung> select_rungs(const Rung (&rungs)[kN], const std::string& filter) {
  std::vector<Rung> found(std::begin(rungs), std::end(rungs));
  std::erase_if(found, [&](const Rung& rung) {
    return std::string(rung.name).find(filter) == std::string::npos;
  });
  return found;
}

bool run_gemms(int64_t size, const std::vector<GemmRung>& rungs, Device device) {
  std::printf("%-18s %-22s %12s %10s %9s %8s   %s\n", "C = A B^T, bf16", "[M, N, K]", "median us",
              "TFLOP/s", "cuBLASLt", "ratio", "error");
  const Tensor a = random({size, size}, DType::kBF16, device);
  const Tensor b = random({size, size}, DType::kBF16, device);
  Tensor c = Tensor::empty_like(a), expected = Tensor::empty_like(a);
  bool correct = true;
  for (const GemmRung& rung : rungs) {
    if (rung.hopper && !has_wgmma(device)) {
      std::printf("%-18s skipped: requires sm_90a\n", rung.name);
      continue;
    }
    const double error = gemm_error(rung, device);
    const Times times = time_interleaved(
        device,
        [&] {
          rung.run({c, a, b});
        },
        [&] {
          kernels::matmul({expected, a, b, {.b = kernels::Transpose::kYes}});
        });
    const auto side = static_cast<double>(size);
    correct &= print_row(rung.name, Shape{size, size, size}.str(), error, kGemmTolerance, times,
                         2 * side * side * side, 1e12);
  }
  return correct;
}

bool run_softmaxes(int64_t size, const std::vector<SoftmaxRung>& rungs, Device device) {
  std::printf("%-18s %-22s %12s %10s %9s %8s   %s\n", "softmax, f32", "[rows, columns]",
              "median us", "GB/s", "copy", "ratio", "error");
  bool correct = true;
  for (const Shape& shape : {Shape{8 * size, size / 8}, Shape{size, size}}) {
    const Tensor x = random(shape, DType::kF32, device, 10);
    Tensor y = Tensor::empty_like(x), copy = Tensor::empty_like(x);
    for (const SoftmaxRung& rung : rungs) {
      if (shape[1] > rung.columns) {
        std::printf("%-18s %-22s skipped: for up to %lld columns\n", rung.name, shape.str().c_str(),
                    static_cast<long long>(rung.columns));
        continue;
      }
      const double error = softmax_error(rung, device);
      const Times times = time_interleaved(
          device,
          [&] {
            rung.run({y, x});
          },
          [&] { copy.copy_(x); });
      correct &= print_row(rung.name, shape.str(), error, kSoftmaxTolerance, times,
                           2 * static_cast<double>(x.nbytes()), 1e9);
    }
  }
  return correct;
}

int run(int argc, char** argv) {
  CLI::App app{"ladders of kernels, from the simplest to the fastest"};
  int64_t size = 8192;
  std::string filter, device_text = "cuda";
  app.add_option("--size", size, "rows and columns of the matrices, a multiple of 64")
      ->check(CLI::Range(64, 65536))
      ->capture_default_str();
  app.add_option("--filter", filter, "only rungs whose name contains this text");
  app.add_option("--device", device_text, "cuda or cuda:N")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const Device device = parse_device(device_text, "device");
  if (!device.is_cuda()) throw InputError("--device: the ladders are for CUDA devices");
  if (size % 64 != 0) throw InputError("--size: expected a multiple of 64");
  const auto gemms = select_rungs(kGemms, filter);
  const auto softmaxes = select_rungs(kSoftmaxes, filter);
  if (gemms.empty() && softmaxes.empty())
    throw InputError(str("no rung has '", filter, "' in its name"));
  bool correct = true;
  if (!gemms.empty()) correct &= run_gemms(size, gemms, device);
  if (!softmaxes.empty()) correct &= run_softmaxes(size, softmaxes, device);
  return correct ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& e) {
    std::cerr << "cohort_bench_ladder: " << e.what() << '\n';
    return 2;
  }
}
