// Optimizers of a model's parameters, learning rate schedules and gradient clipping.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <vector>

#include "config/visitor.h"
#include "core/non_copyable.h"
#include "data/safetensors.h"
#include "nn/transformer.h"
#include "trainers/fingerprints.h"
#include "trainers/host_state.h"

namespace cohort {

enum class Schedule { kCosine, kLinear, kConstant };
inline constexpr EnumName<Schedule> kScheduleNames[] = {{Schedule::kCosine, "cosine"},
                                                        {Schedule::kLinear, "linear"},
                                                        {Schedule::kConstant, "constant"}};
// The dtype of AdamW's moments: the accumulation dtype, or bf16, stochastically rounded.
enum class MomentKind { kF32, kBF16 };
inline constexpr EnumName<MomentKind> kMomentKindNames[] = {{MomentKind::kF32, "f32"},
                                                            {MomentKind::kBF16, "bf16"}};
// Memory of the moments and of the low bits of masters: the device's, or page-locked memory of the
// host, from which every update streams them through the device. It changes no bit. kAuto: the
// start of a run chooses; until then it means the device.
enum class StatePlace { kDevice, kHost, kAuto };
inline constexpr EnumName<StatePlace> kStatePlaceNames[] = {
    {StatePlace::kDevice, "device"}, {StatePlace::kHost, "host"}, {StatePlace::kAuto, "auto"}};
struct OptimizerStorage {
  MomentKind moments = MomentKind::kF32;
  StatePlace place = StatePlace::kAuto;
  int64_t host_units = 0;
  // True if the state of unit `unit` of a ParameterSet is in the host's memory.
  bool on_host(size_t unit) const {
    return place == StatePlace::kHost &&
           (host_units == 0 || static_cast<int64_t>(unit) < host_units);
  }
  void visit(ConfigVisitor& v) {
    v.choice("moments", moments, kMomentKindNames,
             "AdamW's moments: f32 (f64 beside dtype f64), or bf16 with stochastic rounding, 4 "
             "bytes less a parameter");
    v.choice("place", place, kStatePlaceNames,
             "memory of the optimizer's state: device; host: page-locked memory, streamed through "
             "the device in every update, with the same bits; auto: the device if it fits");
    v.field("host_units", host_units,
            "(place: host) units of the model (tables, each block, end) whose state is in the "
            "host's memory, from the first on; 0: all",
            {.min = 0, .max = 1 << 20});
  }
};

struct OptimizerConfig {
  double learning_rate = 1e-3, min_learning_rate = 0;
  Schedule lr_schedule = Schedule::kCosine;
  int64_t warmup_steps = 0;
  double weight_decay = 0.1, adam_beta1 = 0.9, adam_beta2 = 0.95, adam_eps = 1e-8,
         max_grad_norm = 1;
  Sharding sharding = Sharding::kAuto;
  int64_t reduction_lanes = 0;
  OptimizerStorage storage;
  void visit(ConfigVisitor& v) {
    v.field("learning_rate", learning_rate,
            "peak learning rate; sft: 2e-5, grpo: 1e-6; with lora ten times as high",
            {.min = 0, .max = 1e3});
    v.field("min_learning_rate", min_learning_rate, "learning rate at the end of the schedule",
            {.min = 0, .max = 1e3});
    v.choice("lr_schedule", lr_schedule, kScheduleNames,
             "from the peak to the minimum over the steps; grpo: linear");
    v.field("warmup_steps", warmup_steps, "steps of linear warm-up from 0; sft: 3 % of the steps",
            {.min = 0});
    v.field("weight_decay", weight_decay, "decoupled, on matrices only; sft, grpo: 0",
            {.min = 0, .max = 10});
    v.field("adam_beta1", adam_beta1, "decay of the first moment", {.min = 0, .max = 0.9999999});
    v.field("adam_beta2", adam_beta2, "decay of the second moment; sft, grpo: 0.999",
            {.min = 0, .max = 0.9999999});
    v.field("adam_eps", adam_eps, "added to the root of the second moment",
            {.min = 1e-30, .max = 1});
    v.field("max_grad_norm", max_grad_norm, "global gradient clipping; 0: off", {.min = 0});
    v.choice("sharding", sharding, kShardingNames,
             "what each rank of several holds a slice of: none; optimizer: its state (ZeRO-1); "
             "gradients: also their sums (ZeRO-2); full: also, in an update, the weights of blocks "
             "(ZeRO-3); auto: none without a GPU, else the first of the others that fits");
    v.field("reduction_lanes", reduction_lanes,
            "an update has the same bits on any number of ranks that divides this power of two; "
            "takes memory for log2(lanes / ranks) more gradients; 0: off",
            {.min = 0, .max = 1024});
    v.section("optimizer", storage, "storage of the optimizer's state");
  }
};

// AdamW for the trained parameters of a set, with decay where the use of one has it; owns the state
// that it needs for that. Moments start from zero; bf16 parameters get f32 masters, split into
// weight and low bits. Over several ranks each may hold and update only the parts in its slices.
class Optimizer : NonCopyable {
 public:
  // `seed`: for the rounding of bf16 moments. The set must outlive the optimizer, which holds the
  // state of these slices.
  Optimizer(const ParameterSet& parameters, const OptimizerConfig& config, uint64_t seed = 0,
            const Slices& slices = {});
  // Allocates the device memory that step() and gather_weights() need besides the state, so that
  // neither can run out of memory on some of the ranks. It is kept until free_workspace(), and made
  // by step() if it does not exist.
  void allocate_workspace();
  void free_workspace();
  // One update, with gradients scaled down if their norm (f64 [1]; undefined: no
  // clipping) exceeds max_grad_norm. A norm that is not finite makes no update. Sets
  // non_finite (f64 [1], may be undefined) to 1 if an updated weight or state is not finite.
  // `gradients`: of the parts of this rank, in the order of parts_in(); empty: those of the
  // parameters. If the state is sharded, only these parts of the weights have changed. `weights`:
  // likewise where those are, if not in the parameters; undefined ones are there. `after_unit` is
  // called for every unit, in order, when its update is queued.
  void step(double learning_rate, const Tensor& norm, const Tensor& non_finite = {},
            std::span<const Tensor> gradients = {}, std::span<const Tensor> weights = {},
            const std::function<void(size_t unit)>& after_unit = nullptr);
  // If the state is sharded: gives every rank the weights that the others have updated in their
  // parameters, all or those of a unit; with `blocks_are_sharded` none that ShardedWeights gathers.
  // Every rank calls it.
  void gather_weights(Communicator& comm) const;
  void gather_weights(const PartGather& parts, size_t unit, bool blocks_are_sharded) const;
  bool is_sharded() const { return slices_.count < slices_.all; }
  int64_t updates() const { return updates_; }
  // A sample of the trained weights (their masters), the same elements in each call: up to 4,096 of
  // each parameter, of which a sharded optimizer has its parts, times a factor such that the norm
  // of the sample estimates that of all trained weights. Synchronizes with the device.
  std::vector<double> sample_weights() const;
  // Returns those of the state of each parameter, "NAME.m" for instance, or of this rank's part.
  std::vector<Fingerprint> fingerprints() const;

  // The state of every parameter, or of those of a unit, whole: "NAME.m", "NAME.v" and, of bf16
  // parameters, the f32 "NAME.master", combined on the CPU. Tensors in the host's memory are the
  // state itself, which the next step changes. Of a sharded state, a source can be made once after
  // gather_state() of its unit: it takes the tensor from there, or for a master the low bits.
  std::vector<TensorSource> state_sources(std::optional<size_t> unit = {});
  // Allocates what gather_state() needs: for the state of `unit` on this rank's host, in place of
  // the last unit there, or with nullopt for that of another rank. Makes no collective call.
  void allocate_gathered(std::optional<size_t> unit);
  // Gathers the state of a unit on the host of rank `to`. Every rank calls it, after
  // allocate_gathered(), and requests no memory. Without sharding it does nothing.
  void gather_state(Communicator& comm, size_t unit, int to);
  void free_gathered();
  // Reads the files that any number of ranks has written. Also rounds masters into their
  // parameters, and f32 moments to nearest if they are bf16 here. If the state is sharded, only the
  // parts of this rank are read, and gather_weights() has to follow. Throws InputError if a tensor
  // is missing, has another shape or is not finite.
  void load(const SafetensorsFolder& files, int64_t updates);

 private:
  // A parameter's tensors.
  struct State {
    Tensor m, v, low_bits;
  };
  DType moments_of(DType parameter) const;
  // The index of a parameter's part among `parts_`.
  size_t part_of(size_t parameter) const;
  void allocate_gather_memory();
  // The state of a part of this rank, or of a piece of one.
  State state_of(const ParameterPart& piece) const;
  void load_part(const SafetensorsFolder& files, size_t i);

  OptimizerConfig config_;
  uint64_t seed_;
  const Slices slices_;
  int64_t updates_ = 0;
  const ParameterSet& set_;
  std::vector<ParameterPart> parts_;  // those whose state is in `tensors_`
  std::vector<kernels::AdamWTensor> tensors_;
  Tensor gather_memory_;   // u8, of gather_weights() and gather_state()
  size_t host_count_ = 0;  // the first tensors, whose state is in the host's memory
  std::optional<HostState> host_state_;
  std::map<size_t, State> gathered_;  // by the parameter
};
// Bytes of the state of one rank: in memory of the device, in page-locked memory of the host, of
// all ranks in a checkpoint, and those that a save allocates on the host. And of an update on the
// device: its gradients, with what their sums over several ranks need, and the workspace of step().
// With Sharding::kFull also the weights that an update holds beside the model's, and those of the
// model whose memory it can use.
struct OptimizerBytes {
  int64_t memory = 0, pinned = 0, saved = 0, host = 0, gradients = 0, workspace = 0;
  int64_t weights = 0, released = 0;
};
OptimizerBytes optimizer_bytes(const OptimizerConfig& config, const ModelConfig& model, DType dtype,
                               Device device, int64_t ranks = 1);

// Learning rate of `step` (from 0) of `steps`: linear warm-up to the peak at step warmup_steps,
// then the schedule, which would reach min_learning_rate at step `steps`: the last step still
// trains.
double scheduled_learning_rate(const OptimizerConfig& config, int64_t step, int64_t steps);

}  // namespace cohort
