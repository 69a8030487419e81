#include "bench/op_times.h"

#include <algorithm>
#include <cstdio>
#include <vector>

#include "core/trace.h"

namespace cohort::bench {
namespace {

constexpr int kSteps = 3;
constexpr double kPeakFlops = 989e12;

// The outermost op that an event belongs to; null: none.
const TraceEvent* outermost_op(const std::vector<TraceEvent>& events, const TraceEvent& event) {
  const TraceEvent* op = event.kind == TraceEvent::Kind::kOp ? &event : nullptr;
  for (int64_t next = event.op; next >= 0; next = op->op) op = &events[static_cast<size_t>(next)];
  return op;
}

// Returns true for the events whose times are added: kernels and copies on CUDA, outermost ops on
// the CPU.
bool is_timed(const TraceEvent& event, Device device) {
  using Kind = TraceEvent::Kind;
  if (device.is_cuda()) return event.kind == Kind::kKernel || event.kind == Kind::kCopy;
  return event.kind == Kind::kOp && event.op < 0;
}

}  // namespace

OpCosts step_costs(const Transformer& model, const OptimizerStorage& storage, int64_t tokens,
                   int64_t targets) {
  const ModelConfig& c = model.config();
  const auto element = static_cast<double>(dtype_size(model.dtype()));
  const auto accumulator = static_cast<double>(dtype_size(accumulate_dtype(model.dtype())));
  const auto t = static_cast<double>(tokens), layers = static_cast<double>(c.num_layers),
             d = static_cast<double>(c.d_model), ff = static_cast<double>(c.d_ff),
             rows = static_cast<double>(targets), logits = static_cast<double>(c.num_logits()),
             q = static_cast<double>(c.num_heads * c.head_dim),
             kv = static_cast<double>(c.num_kv_heads * c.head_dim),
             parameters = static_cast<double>(model_size(c).parameters);
  OpCosts out;
  const auto add = [&](const char* op, double flops, double bytes) {
    out[op].flops += layers * flops;
    out[op].bytes += layers * bytes;
  };
  const auto forward = [&](double n, double k) {
    add("linear_forward", 2 * t * n * k, (t * (n + k) + n * k) * element);
  };
  const auto input_gradient = [&](double n, double k) {
    add("matmul", 2 * t * n * k, (t * (n + k) + n * k) * element);
  };
  const auto weight_gradient = [&](double n, double k) {
    add("matmul", 2 * t * n * k, t * (n + k) * element + n * k * accumulator);
  };
  for (const auto& [n, k] : {std::pair{q + 2 * kv, d}, {d, q}}) {
    forward(n, k);
    input_gradient(n, k);
    weight_gradient(n, k);
  }
  // In an MLP the up projection is fused with the activation, and the activation's gradient with
  // the preceding matmul.
  const double up = is_gated(c.mlp) ? 2 * ff : ff;
  add("linear_activation", 2 * t * up * d, (t * (d + up + ff) + up * d) * element);
  forward(d, ff);
  weight_gradient(d, ff);
  add("linear_activation_backward", 2 * t * d * ff, (t * (d + 2 * up) + d * ff) * element);
  input_gradient(up, d);
  weight_gradient(up, d);
  // A causal token sees half of its sequence on average.
  const double keys = static_cast<double>(c.context) / (c.is_encoder() ? 1 : 2);
  const double scores = layers * 2 * t * keys * q;
  out["attention_forward"] = {2 * scores, layers * t * (2 * q + 2 * kv) * element};
  out["attention_backward"] = {5 * scores, layers * t * (4 * q + 4 * kv) * element};
  out["head_logprob_forward"] = {6 * rows * d * logits,
                                 2 * rows * d * element + logits * d * (element + accumulator)};
  const std::string norm = c.norm == NormType::kRms ? "rms_norm" : "layer_norm";
  out["add_" + norm + "_forward"].bytes = 2 * layers * t * 4 * d * element;
  out[norm + "_backward"].bytes = 2 * layers * t * 4 * d * element;
  if (c.position == PositionType::kRope)
    out["rope"].bytes = 2 * layers * t * 2 * (q + kv) * element;
  // Weight, low bits of a master where there is one, and both moments are read and written,
  // gradients read.
  const double low_bits = model.dtype() == DType::kBF16 ? 2 : 0;
  const double moment = storage.moments == MomentKind::kBF16 ? 2 : accumulator;
  out["adamw_step"].bytes = parameters * (2 * (element + low_bits + 2 * moment) + accumulator);
  out["grad_norm"].bytes = parameters * accumulator;
  return out;
}

void print_op_times(Device device, const std::function<void()>& step, double seconds,
                    const OpCosts& costs) {
  step();
  Trace trace(device);
  for (int i = 0; i < kSteps; ++i) step();
  const std::vector<TraceEvent> events = trace.finish();
  struct Time {
    int64_t nanoseconds = 0, calls = 0;
  };
  std::map<std::string, Time> times;
  int64_t all = 0;
  std::vector<const TraceEvent*> in_order;
  for (const TraceEvent& event : events) in_order.push_back(&event);
  std::sort(in_order.begin(), in_order.end(), [](auto* a, auto* b) { return a->end < b->end; });
  std::map<int64_t, int64_t> stream_busy_until;
  for (const TraceEvent* event : in_order) {
    const TraceEvent* op = outermost_op(events, *event);
    Time& time = times[op == nullptr ? event->name : op->name];
    time.calls += op == event;
    if (!is_timed(*event, device)) continue;
    // With programmatic dependent launch a kernel starts early and waits for the previous one.
    int64_t& busy = stream_busy_until[event->stream];
    const int64_t spent = event->end - std::max(event->begin, busy);
    busy = event->end;
    time.nanoseconds += spent;
    all += spent;
  }
  std::vector<std::pair<std::string, Time>> sorted(times.begin(), times.end());
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
    return a.second.nanoseconds > b.second.nanoseconds;
  });
  std::printf("\n%-24s %6s %9s %6s %9s\n", "op", "calls", "ms", "share", "roofline");
  const double bandwidth = memory_bandwidth(device);
  for (const auto& [name, time] : sorted) {
    const double spent = 1e-9 * static_cast<double>(time.nanoseconds) / kSteps;
    const double share = static_cast<double>(time.nanoseconds) / static_cast<double>(all);
    if (share < 1e-3) continue;
    std::printf("%-24s %6lld %9.3f %4.1f %%", name.c_str(),
                static_cast<long long>(time.calls / kSteps), spent * 1e3, 100 * share);
    if (const auto cost = costs.find(name); cost != costs.end() && bandwidth > 0)
      std::printf(
          " %7.0f %%",
          100 * std::max(cost->second.flops / kPeakFlops, cost->second.bytes / bandwidth) / spent);
    std::printf("\n");
  }
  const double sum = 1e-9 * static_cast<double>(all) / kSteps;
  std::printf("%-24s %6s %9.3f, %.1f %% of the step\n", "all", "", 1e3 * sum, 100 * sum / seconds);
}

}  // namespace cohort::bench
