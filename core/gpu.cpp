#include "core/gpu.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <vector>

#include "core/check.h"
#include "core/cuda_backend.h"
#include "core/text.h"
#include "core/with_cuda.h"

namespace cohort {
namespace {

constexpr double kGiB = 1 << 30;
constexpr int kSupported[] = {80, 86, 89, 90, 100, 103, 120};
constexpr int kOnAarch64[] = {87, 110, 121};  // Jetson Orin, Jetson Thor, DGX Spark

bool contains(std::span<const int> numbers, double number) {
  return std::find(numbers.begin(), numbers.end(), number) != numbers.end();
}

[[noreturn]] void reject(const std::string& text, const std::string& reason) {
  throw InputError(str("--gpu: '", text, "' ", reason));
}

// Compute capabilities as numbers that may be no integer: they come from the user.
void expect_supported(double capability, const std::string& text) {
  if (contains(kSupported, capability)) return;
  if (contains(kOnAarch64, capability))
    reject(text, "is a GPU of aarch64 machines, for which there is no build; hint: x86-64");
  if (contains(kSupported, std::round(10 * capability)))
    reject(text,
           str("has its compute capability with a point; hint: sm=", std::round(10 * capability)));
  if (capability < kSupported[0])
    reject(text, "is too old: the kernels need compute capability 8.0 (sm=80) or newer");
  std::vector<std::string> known;
  for (const int number : kSupported) known.push_back(std::to_string(number));
  reject(text, "has an unknown compute capability; known are sm=" + join(known, ", "));
}

// The end of a message on a GPU that known_gpus() lacks: its variants, why it cannot be used or its
// description; "" if it is unknown.
std::string other_gpu(const std::string& name) {
  constexpr const char* kOld[] = {"t4",      "v100",    "p100",    "p40",     "m40",
                                  "k80",     "rtx2060", "rtx2070", "rtx2080", "gtx1080",
                                  "gtx1070", "gtx1060", "titanv",  "titanxp"};
  constexpr std::pair<const char*, const char*> kDescriptions[] = {
      {"rtx3050", "8,sm=86"},   {"rtx3060ti", "8,sm=86"},  {"rtx3070", "8,sm=86"},
      {"rtx3080", "10,sm=86"},  {"rtx3080ti", "12,sm=86"}, {"rtx3090ti", "24,sm=86"},
      {"rtx4060", "8,sm=89"},   {"rtx4070", "12,sm=89"},   {"rtx4070ti", "12,sm=89"},
      {"rtx4080", "16,sm=89"},  {"rtx5060", "8,sm=120"},   {"rtx5070", "12,sm=120"},
      {"rtx5080", "16,sm=120"}, {"a30", "24,sm=80"},       {"a40", "45,sm=86"},
      {"a4000", "16,sm=86"},    {"a5000", "24,sm=86"},     {"l40", "45,sm=89"}};
  std::vector<std::string> variants;
  for (const GpuProperties& gpu : known_gpus())
    if (gpu.name.starts_with(name + "-")) variants.push_back(gpu.name);
  if (!variants.empty()) return "; hint: " + join(variants, " or ");
  for (const char* old : kOld)
    if (name == old || name == str(old, "ti"))
      return ": it is too old, as the kernels need compute capability 8.0 (sm=80) or newer; hint: "
             "without --gpu the plan is for this machine";
  for (const auto& [other, description] : kDescriptions)
    if (name == other) return str("; hint: GiB=", description, " describes it");
  return "";
}

// Parses "GiB=24,sm=89".
GpuProperties described_gpu(const std::string& text) {
  constexpr double kMostGiB = 1024;
  std::optional<double> gib, capability;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size()),
                 equals = std::min(text.find('=', begin), end);
    const std::string key = text.substr(begin, equals - begin);
    std::optional<double>& value = key == "GiB" ? gib : capability;
    double number = 0;
    const auto parsed =
        std::from_chars(text.data() + std::min(equals + 1, end), text.data() + end, number);
    if ((key != "GiB" && key != "sm") || value || parsed.ec != std::errc() ||
        parsed.ptr != text.data() + end)
      reject(text, "is no description: expected GiB and sm once each, as in GiB=24,sm=89");
    value = number;
    begin = end + 1;
  }
  if (!gib || !capability) reject(text, str("lacks ", gib ? "sm" : "GiB", ", as in GiB=24,sm=89"));
  if (!(*gib >= 1 && *gib <= kMostGiB))
    reject(text, str("has no memory of a GPU: expected GiB from 1 to ", kMostGiB));
  expect_supported(*capability, text);
  const int number = static_cast<int>(*capability);
  return {.name = text,
          .compute_capability = number,
          .shared_memory = shared_memory_of(number),
          .memory = static_cast<int64_t>(*gib * kGiB)};
}

}  // namespace

int64_t shared_memory_of(int compute_capability) {
  switch (compute_capability) {
    case 80:
    case 87:
      return 163 << 10;
    case 90:
    case 100:
    case 103:
    case 110:
      return 227 << 10;
    default:
      return 99 << 10;  // 8.6, 8.9, 12.0 and 12.1
  }
}

bool fits(const KernelNeeds& needs, const GpuProperties& gpu) {
  return needs.shared_memory <= gpu.shared_memory &&
         (needs.is_exact ? gpu.compute_capability == needs.compute_capability
                         : gpu.compute_capability >= needs.compute_capability);
}

std::span<const GpuProperties> known_gpus() {
  // GiB as cudaMemGetInfo() gives them, with ECC where it is on by default. Drivers differ by some
  // 1 %; the least is listed. TFLOP/s: NVIDIA's data sheets, without sparsity. GB/s of memory,
  // NVLink and network: those of A100, H100 (both SXM), H200 and B200, and of DGX machines.
  const auto gpu = [](const char* name, int capability, int multiprocessors, double gib,
                      double tflops, double memory = 0, double link = 0, double network = 0) {
    return GpuProperties{.name = name,
                         .compute_capability = capability,
                         .multiprocessors = multiprocessors,
                         .shared_memory = shared_memory_of(capability),
                         .memory = static_cast<int64_t>(gib * kGiB),
                         .flops = 1e12 * tflops,
                         .bandwidth = 1e9 * memory,
                         .link = 1e9 * link,
                         .network = 1e9 * network};
  };
  static const GpuProperties gpus[] = {gpu("rtx3060", 86, 28, 11.6, 25),
                                       gpu("rtx3090", 86, 82, 23.6, 71),
                                       gpu("rtx4060ti", 89, 34, 15.6, 44),
                                       gpu("rtx4090", 89, 128, 23.5, 165),
                                       gpu("rtx5090", 120, 170, 31.3, 209),
                                       gpu("a10", 86, 72, 22.0, 125),
                                       gpu("l4", 89, 58, 22.0, 121),
                                       gpu("a6000", 86, 84, 47.4, 155),
                                       gpu("l40s", 89, 142, 44.3, 362),
                                       gpu("a100-40", 80, 108, 39.4, 312, 1555, 300, 25),
                                       gpu("a100-80", 80, 108, 79.1, 312, 2039, 300, 25),
                                       gpu("h100", 90, 132, 79.1, 989, 3350, 450, 50),
                                       gpu("h200", 90, 132, 139.7, 989, 4800, 450, 50),
                                       gpu("b200", 100, 148, 178.3, 2250, 8000, 900, 50)};
  return gpus;
}

GpuProperties gpu_named(const std::string& text) {
  if (text.find('=') != text.npos) return described_gpu(text);
  std::string name = text;
  for (char& c : name)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  std::vector<std::string> names;
  for (const GpuProperties& gpu : known_gpus()) {
    if (gpu.name == name) return gpu;
    names.push_back(gpu.name);
  }
  if (const std::string other = other_gpu(name); !other.empty())
    throw InputError(str("--gpu: no GPU is known as '", text, "'", other));
  throw InputError(str("--gpu: no GPU is known as '", text, "'", did_you_mean(name, names),
                       "; hint: one of ", join(names, ", "), ", or GiB=24,sm=89"));
}

void synchronize_all_streams(Device device) {
  on_device<[](Device) {}, cuda::synchronize_all_streams>(device, device);
}

}  // namespace cohort
