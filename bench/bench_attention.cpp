// Attention timings on a GPU: bf16, random normal data, 16,384 tokens and the shapes that kernels
// are usually compared on. Medians over bursts of back-to-back launches, with a pause between
// bursts (at its power limit a GPU throttles). FLOPs: two matmuls forward and five backward, over
// the visible part of a causal mask; the time of the backward includes the kernels before and after
// its matmuls.
//
//  cohort_bench_attention                 a table
//  cohort_bench_attention --rules         of masks and modified scores
//  cohort_bench_attention --precision fp8 of FP8 attention, beside bf16; or int8
//  bench/attention                        interleaved with cuDNN (--rules: PyTorch), burst by burst
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <numbers>
#include <thread>

#include "bench/timing.h"
#include "core/rng.h"
#include "kernels/attention/attention.h"
#include "kernels/quantize.h"
#include "kernels/rope.h"

namespace {

using namespace cohort;
using namespace cohort::kernels;

struct Case {
  std::string name;
  int64_t heads, kv_heads, dim;
  bool causal;
  std::vector<int64_t> lengths;
  std::string rule = {};  // one of kRules, fp8, int8, or empty

  int64_t tokens() const {
    int64_t sum = 0;
    for (const int64_t length : lengths) sum += length;
    return sum;
  }
  // FLOPs of one matmul of all queries with their visible keys.
  double matmul_flops() const {
    double pairs = 0;
    for (const int64_t length : lengths)
      pairs += static_cast<double>(causal ? length * (length + 1) / 2 : length * length);
    return 2 * pairs * static_cast<double>(heads * dim);
  }
};

std::vector<Case> make_cases() {
  constexpr int64_t kTokens = 16384;
  std::vector<Case> cases;
  const auto add = [&](const std::string& name, int64_t heads, int64_t kv_heads, int64_t dim,
                       bool causal, int64_t length) {
    cases.push_back({name, heads, kv_heads, dim, causal,
                     std::vector<int64_t>(static_cast<size_t>(kTokens / length), length)});
  };
  for (const int64_t dim : {64, 128, 256})
    for (const bool causal : {false, true})
      for (const int64_t length : {1024, 4096, 16384})
        add(str("d", dim, causal ? " causal " : " full ", length / 1024, "k"), 2048 / dim,
            2048 / dim, dim, causal, length);
  for (const int64_t length : {2048, 8192})
    add(str("GQA 32/8 d128 causal ", length / 1024, "k"), 32, 8, 128, true, length);
  add("GQA 14/2 d64 causal 2k", 14, 2, 64, true, 2048);
  for (const int64_t dim : {96, 192})
    for (const bool causal : {false, true})
      add(str("d", dim, causal ? " causal 4k" : " full 4k"), 1536 / dim, 1536 / dim, dim, causal,
          4096);
  // Packed sequences of 200 to 3,000 tokens, and equally long ones with the same mean.
  Rng rng(1, rng_stream(kBenchPurpose));
  Case packed{.name = "64 lengths d128 causal",
              .heads = 16,
              .kv_heads = 16,
              .dim = 128,
              .causal = true,
              .lengths = {}};
  for (int i = 0; i < 64; ++i) packed.lengths.push_back(200 + rng.below(2801));
  Case equal = packed;
  equal.name = "64 equal d128 causal";
  equal.lengths.assign(64, packed.tokens() / 64);
  cases.push_back(packed);
  cases.push_back(equal);
  return cases;
}

// Masks and modifications of scores, beside the plain causal mask; bench/attention has the same.
constexpr const char* kRules[] = {"causal",    "full",  "alibi",      "distance",
                                  "soft_cap",  "bias",  "sinks",      "windows",
                                  "prefix_lm", "tiles", "tiles_full", "dropout"};

std::vector<Case> make_rule_cases() {
  std::vector<Case> cases;
  for (const int64_t dim : {64, 128})
    for (const int64_t length : {4096, 16384})
      for (const std::string rule : kRules) {
        const bool full = rule == "full" || rule == "windows" || rule == "tiles_full";
        cases.push_back({str(rule, " d", dim, " ", length / 1024, "k"), 2048 / dim, 2048 / dim, dim,
                         !full, std::vector<int64_t>(static_cast<size_t>(16384 / length), length),
                         rule});
      }
  return cases;
}

// Heads of FP8 or int8 attention, beside bf16.
std::vector<Case> make_precision_cases(const std::string& precision) {
  std::vector<Case> cases;
  for (const int64_t dim : {128, 64, 256})
    for (const bool causal : {true, false})
      for (const int64_t length : {4096, 8192, 16384})
        for (const std::string& rule : {std::string(), precision})
          if (dim <= 128 || precision == "fp8")
            cases.push_back(
                {str("GQA 64/8 d", dim, causal ? " causal " : " full ", length / 1024, "k ", rule),
                 64, 8, dim, causal,
                 std::vector<int64_t>(static_cast<size_t>(16384 / length), length), rule});
  return cases;
}

// A quarter of all tiles, and the diagonal: tile (q, k) is visible if (5 q + 3 k) mod 4 is 0.
Tensor quarter_of_tiles(int64_t length, Device device) {
  std::vector<std::pair<int64_t, int64_t>> visible;
  const int64_t tiles = (length + kMaskTile - 1) / kMaskTile;
  for (int64_t q = 0; q < tiles; ++q)
    for (int64_t k = 0; k < tiles; ++k)
      if ((5 * q + 3 * k) % 4 == 0) visible.emplace_back(q, k);
  return make_tile_mask(visible, tiles, device);
}

void set_rule(AttentionDesc& desc, const Case& c, Device device) {
  const int64_t length = c.lengths[0];
  const auto table = [&](int64_t columns) {
    Tensor t = Tensor::empty({c.heads, columns}, DType::kF32);
    for (int64_t i = 0; i < t.numel(); ++i)
      t.data<float>()[i] =
          std::exp2(-8.0f * static_cast<float>(i % c.heads + 1) / static_cast<float>(c.heads));
    return (columns == 1 ? t.reshape({c.heads}) : t).to(device);
  };
  if (c.rule == "alibi") desc.slopes = table(1);
  if (c.rule == "distance") desc.distance = {0.7, 0.005};
  if (c.rule == "soft_cap") desc.soft_cap = 30;
  if (c.rule == "bias") desc.bias = table(2 * 128 + 1);
  if (c.rule == "sinks") desc.sinks = table(1);
  if (c.rule == "windows") {
    desc.window = 513;
    desc.window_right = 512;
  }
  if (c.rule == "prefix_lm")
    desc.prefix_lm =
        Tensor::from(std::vector<int32_t>(c.lengths.size(), static_cast<int32_t>(length / 2)))
            .to(device);
  if (c.rule == "tiles" || c.rule == "tiles_full") desc.tiles = quarter_of_tiles(length, device);
  if (c.rule == "dropout") {
    std::vector<int64_t> sequences;
    std::vector<int32_t> positions;
    for (size_t s = 0; s < c.lengths.size(); ++s)
      for (int64_t t = 0; t < length; ++t) {
        sequences.push_back(static_cast<int64_t>(s));
        positions.push_back(static_cast<int32_t>(t));
      }
    desc.dropout = {.p = 0.1,
                    .seed = 1,
                    .stream = 2,
                    .sequences = Tensor::from(sequences).to(device),
                    .positions = Tensor::from(positions).to(device)};
  }
}

// Normal random numbers: generated once, and repeated in larger tensors.
class Normals {
 public:
  explicit Normals(Device device) : device_(device) {}
  Tensor operator()(const Shape& shape) {
    if (!all_.defined()) {
      Tensor t = Tensor::empty({kCount}, DType::kF32);
      float* const values = t.data<float>();
      for (int64_t i = 0; i < kCount; i += 4) {
        const auto words = philox(3, rng_stream(kBenchPurpose), static_cast<uint64_t>(i / 4));
        for (size_t k = 0; k < 4; k += 2) {  // Box-Muller
          const double radius = std::sqrt(-2 * std::log(1 - uniform_f32(words[k]))),
                       angle = 2 * std::numbers::pi * uniform_f32(words[k + 1]);
          values[i + static_cast<int64_t>(k)] = static_cast<float>(radius * std::cos(angle));
          values[i + static_cast<int64_t>(k) + 1] = static_cast<float>(radius * std::sin(angle));
        }
      }
      all_ = t.to(DType::kBF16).to(device_);
    }
    Tensor out = Tensor::empty({shape.numel()}, DType::kBF16, device_);
    for (int64_t done = 0; done < out.numel();) {
      const int64_t count = std::min(out.numel() - done, kCount - offset_);
      out.narrow(0, done, count).copy_(all_.narrow(0, offset_, count));
      done += count;
      offset_ = (offset_ + count) % kCount;
    }
    return out.reshape(shape);
  }

 private:
  static constexpr int64_t kCount = int64_t{1} << 24;
  Device device_;
  Tensor all_;
  int64_t offset_ = 0;
};

void quantize_rows(Tensor& heads, Tensor& scales) {
  const Tensor rows = heads.contiguous().reshape({heads.dim(0) * heads.dim(1), heads.dim(2)});
  auto out = Quantized::empty(rows.shape(), DType::kI8, ScaleGroups::kRows, rows.device());
  quantize({out, rows});
  scales = out.scales.reshape({heads.dim(0), heads.dim(1)});
  heads = out.values.reshape(heads.shape());
}

// Tensors of a case: queries, keys and values as views of one tensor, as in the model.
class Attention {
 public:
  Attention(const Case& c, Normals& normals, Device device) : case_(c) {
    const int64_t tokens = c.tokens();
    const Tensor qkv = normals({tokens, c.heads + 2 * c.kv_heads, c.dim});
    q_ = qkv.narrow(1, 0, c.heads);
    k_ = qkv.narrow(1, c.heads, c.kv_heads);
    v_ = qkv.narrow(1, c.heads + c.kv_heads, c.kv_heads);
    dout_ = normals({tokens, c.heads, c.dim});
    o_ = Tensor::empty(dout_.shape(), DType::kBF16, device);
    lse_ = Tensor::empty({c.heads, tokens}, DType::kF32, device);
    const Tensor dqkv = Tensor::empty(qkv.shape(), DType::kBF16, device);
    dq_ = dqkv.narrow(1, 0, c.heads);
    dk_ = dqkv.narrow(1, c.heads, c.kv_heads);
    dv_ = dqkv.narrow(1, c.heads + c.kv_heads, c.kv_heads);
    std::vector<int32_t> starts = {0};
    for (const int64_t length : c.lengths)
      starts.push_back(starts.back() + static_cast<int32_t>(length));
    cu_ = Tensor::from(starts).to(device);
    desc_.mask = c.causal ? Mask::kCausal : Mask::kFull;
    set_rule(desc_, c, device);
    if (c.rule == "fp8") {
      desc_.fp8_scales = Tensor::full({qkv.dim(1)}, 0x1p-6, DType::kF32, device);
      Tensor rounded = qkv;
      rope({.y = rounded,
            .x = qkv,
            .positions = Tensor::zeros({tokens}, DType::kI32, device),
            .table = {},
            .scales = desc_.fp8_scales});
    }
    if (c.rule == "int8") {
      quantize_rows(q_, desc_.q_scales);
      quantize_rows(k_, desc_.k_scales);
    }
    if (desc_.bias.defined()) dbias_ = Tensor::empty_like(desc_.bias);
    if (desc_.sinks.defined()) dsinks_ = Tensor::empty_like(desc_.sinks);
    forward();
  }
  void forward() {
    attention_forward(
        {.o = o_, .lse = lse_, .q = q_, .k = k_, .v = v_, .cu_seqlens = cu_, .desc = desc_});
  }
  void backward() {
    attention_backward({.dq = {dq_},
                        .dk = {dk_},
                        .dv = {dv_},
                        .dout = dout_,
                        .q = q_,
                        .k = k_,
                        .v = v_,
                        .o = o_,
                        .lse = lse_,
                        .cu_seqlens = cu_,
                        .desc = desc_,
                        .dbias = wanted(dbias_),
                        .dsinks = wanted(dsinks_)});
  }
  // Seconds per launch in a burst of `launches`.
  double burst(bool backwards, int launches) {
    synchronize(q_.device());
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    for (int i = 0; i < launches; ++i) backwards ? backward() : forward();
    synchronize(q_.device());
    return std::chrono::duration<double>(Clock::now() - begin).count() / launches;
  }
  double flops(bool backwards) const { return case_.matmul_flops() * (backwards ? 5 : 2); }
  bool has_backward() const { return case_.rule != "int8"; }

 private:
  static std::optional<GradOut> wanted(Tensor& t) {
    return t.defined() ? std::optional(GradOut{t}) : std::nullopt;
  }

  Case case_;
  AttentionDesc desc_;
  Tensor q_, k_, v_, dout_, o_, lse_, dq_, dk_, dv_, cu_, dbias_, dsinks_;
};

constexpr int kLaunches = 20, kBursts = 7;

void pause() {
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
}

// Prints tab-separated fields: name, heads, key heads, head dim, causal (0 or 1), FLOPs of a
// matmul, lengths.
void print_fields(const Case& c) {
  std::printf("%s\t%lld\t%lld\t%lld\t%d\t%.17g\t", c.name.c_str(), static_cast<long long>(c.heads),
              static_cast<long long>(c.kv_heads), static_cast<long long>(c.dim), c.causal,
              c.matmul_flops());
  for (const int64_t length : c.lengths) std::printf("%lld ", static_cast<long long>(length));
  std::printf("\n");
}

// Reads lines "CASE forward|backward LAUNCHES" and prints the seconds per launch of each burst, so
// that bursts of another program can be interleaved. Ends with its input.
void serve_bursts(const std::vector<Case>& cases, Normals& normals, Device device) {
  std::unique_ptr<Attention> attention;
  size_t current = cases.size();
  size_t index = 0;
  std::string pass;
  int launches = 0;
  while (std::cin >> index >> pass >> launches) {
    if (index >= cases.size() || (pass != "forward" && pass != "backward") || launches < 1)
      throw InputError(
          "--obey: expected lines \"CASE forward|backward LAUNCHES\" with a valid case index");
    if (index != current) {
      attention.reset();
      attention = std::make_unique<Attention>(cases[index], normals, device);
      current = index;
    }
    std::printf("%.9g\n", attention->burst(pass == "backward", launches));
    std::fflush(stdout);
  }
}

int run(int argc, char** argv) {
  CLI::App app{"attention benchmark"};
  std::string filter, device_name = "cuda", precision = "bf16";
  bool list = false, serves_bursts = false, rules = false;
  app.add_option("--filter", filter, "only cases whose name contains this text");
  app.add_option("--device", device_name, "cuda or cuda:N")->capture_default_str();
  app.add_flag("--rules", rules, "masks and modified scores instead of shapes");
  app.add_option("--precision", precision, "bf16, or fp8 or int8 attention beside bf16")
      ->check(CLI::IsMember({"bf16", "fp8", "int8"}));
  app.add_flag("--list", list, "print the cases as tab-separated fields");
  app.add_flag("--obey", serves_bursts,
               "time the bursts requested on standard input; see bench/attention");
  CLI11_PARSE(app, argc, argv);
  const std::vector<Case> cases = precision != "bf16" ? make_precision_cases(precision)
                                  : rules             ? make_rule_cases()
                                                      : make_cases();
  if (list) {
    for (const Case& c : cases) print_fields(c);
    return 0;
  }
  const Device device = parse_device(device_name, "device");
  if (!device.is_cuda()) throw InputError("--device: expected cuda or cuda:N, got " + device_name);
  Normals normals(device);
  if (serves_bursts) {
    serve_bursts(cases, normals, device);
    return 0;
  }
  std::printf("%-24s %12s %8s %12s %8s\n", "bf16", "forward us", "TFLOP/s", "backward us",
              "TFLOP/s");
  for (const Case& c : cases) {
    if (c.name.find(filter) == c.name.npos) continue;
    Attention attention(c, normals, device);
    double seconds[2] = {NAN, NAN};
    for (const bool backwards : {false, true}) {
      if (backwards && !attention.has_backward()) continue;
      std::vector<double> times;
      attention.burst(backwards, 3);
      for (int i = 0; i < kBursts; ++i) {
        pause();
        times.push_back(attention.burst(backwards, kLaunches));
      }
      seconds[backwards] = bench::median(times);
    }
    std::printf("%-24s %12.1f %8.0f %12.1f %8.0f\n", c.name.c_str(), seconds[0] * 1e6,
                attention.flops(false) / seconds[0] * 1e-12, seconds[1] * 1e6,
                attention.flops(true) / seconds[1] * 1e-12);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& e) {
    std::cerr << "cohort_bench_attention: " << e.what() << '\n';
    return 2;
  }
}
