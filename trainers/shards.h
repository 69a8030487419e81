// Gradients, weights and optimizer state of a model over ranks, as in ZeRO (Rajbhandari et al.
// 2020). The gradients of each unit of a ParameterSet are cut into one slice per rank, and a rank
// adds up its slice for all: the others send it what they have, and one kernel adds in one order,
// so that no bit depends on links, buffers or the library that sends.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "config/visitor.h"
#include "core/non_copyable.h"
#include "distributed/communicator.h"
#include "distributed/side_stream.h"
#include "nn/parameter_set.h"

namespace cohort {

// A rank holds a slice of nothing, of the optimizer's state (ZeRO-1), also of the sums of gradients
// (ZeRO-2), or also, in an update, of the weights of blocks (ZeRO-3). kAuto: the start of a run
// chooses; until then it means kNone.
enum class Sharding { kNone, kOptimizer, kGradients, kFull, kAuto };
inline constexpr EnumName<Sharding> kShardingNames[] = {{Sharding::kNone, "none"},
                                                        {Sharding::kOptimizer, "optimizer"},
                                                        {Sharding::kGradients, "gradients"},
                                                        {Sharding::kFull, "full"},
                                                        {Sharding::kAuto, "auto"}};
inline bool is_sharded(Sharding s) {
  return s != Sharding::kNone && s != Sharding::kAuto;
}
// The ranks add up gradients in each micro batch, not once an update.
inline bool sums_each_micro_batch(Sharding s) {
  return s == Sharding::kGradients || s == Sharding::kFull;
}

// Elements [begin, begin + count) of a trained parameter, in row-major order, that are in a slice,
// from the slice's element `at` on.
struct ParameterPart {
  size_t parameter = 0;  // its index in the set
  size_t unit = 0;
  int64_t begin = 0, count = 0, at = 0;

  // The part of a tensor that has `width` elements for each of the parameter's.
  Tensor of(const Tensor& t, int64_t width = 1) const {
    return t.reshape({t.numel()}).narrow(0, width * begin, width * count);
  }
};

// Slices [first, first + count) of `all` equal ones, into which the gradients of a unit are cut.
struct Slices {
  int64_t first = 0, count = 1, all = 1;
  // A rank has one slice, or with lanes as many as it has of these.
  static Slices of_rank(int rank, int ranks, int64_t lanes) {
    const int64_t all = lanes > 0 ? lanes : ranks, count = all / ranks;
    return {rank * count, count, all};
  }
  // Their first element, and how many they have.
  int64_t begin(const ParameterSet& set, size_t unit) const {
    return first * set.slice_size(unit, all);
  }
  int64_t size(const ParameterSet& set, size_t unit) const {
    return count * set.slice_size(unit, all);
  }
};

// The parts of the trained parameters in these slices, in order.
std::vector<ParameterPart> parts_in(const ParameterSet& set, const Slices& slices);

// Exchanges what the ranks have of the trained parameters, each the parts in its slices. Every rank
// makes the same calls.
class PartGather {
 public:
  PartGather(const ParameterSet& set, Communicator& comm, int64_t lanes);
  struct Values {
    DType parameter;  // parameters of other dtypes are left out
    DType dtype;      // that the values have
    int64_t width;    // values for each element
    // The values of a part of this rank, or of a piece of one, on any device.
    std::function<Tensor(const ParameterPart&)> mine;
    // Called with the pieces of all ranks; the values are on the model's device.
    std::function<void(const ParameterPart&, const Tensor&)> store;
  };
  // `memory`: u8 [memory_bytes()] to receive values of one for each element in; undefined: new
  // memory is allocated.
  void gather(size_t unit, const Values& values, Tensor memory = {}) const;
  static int64_t memory_bytes(const ParameterSet& set, const Slices& slices);

 private:
  const ParameterSet& set_;
  Communicator& comm_;
  std::vector<std::vector<ParameterPart>> parts_;  // by rank
};

// The gradients of an update: their memory, and their sums over ranks. The sums of a unit begin
// when its gradients are final, beside the rest of the backward, but after those of the units
// behind it: every rank makes the same calls in the same order.
//
// With L lanes, a power of two, an update's sequences are divided among them, whatever the number
// of ranks is, and each of the N ranks has L / N neighbouring ones. The gradients of each lane are
// added by themselves, and lanes in the tree of kernels/pairwise_sum.h: an update has the same bits
// on any N that divides L.
class ShardedGradients : NonCopyable {  // the parameters' hooks hold its address
 public:
  // All must outlive this.
  ShardedGradients(const ParameterSet& set, Communicator& comm, SideStream& side, Sharding sharding,
                   int64_t lanes = 0);

  // Over several ranks: there are sums in each micro batch, of which all ranks have the same
  // number.
  bool sums_each_micro_batch() const { return sums_each_; }
  // Begins and ends an update; neither calls another rank.
  void allocate();
  // Allocates, for an estimate, all that a backward holds besides: with sums in each micro batch
  // the gradients of the tables or the end, of a block in the backward and of one that is sent.
  std::vector<Tensor> allocate_most() const;
  void free();
  // Around the backwards of a micro batch, which is of the rank's lane `lane`, from 0 on, and not
  // of an earlier one than the last. end_micro_batch() makes the calls that the backwards have not
  // made: there may have been none, or one that failed.
  void begin_micro_batch(bool is_last, int64_t lane = 0);
  void end_micro_batch();
  // Begins the sums of the units from `unit` on that have not begun: the backward has passed them.
  void reduce_from(size_t unit);
  // The sums that are left; later work on the current stream waits for all of them.
  void finish();

  // The parts of the trained parameters that this rank updates, and after finish() the sums of
  // their gradients.
  const std::vector<ParameterPart>& parts() const { return parts_; }
  std::vector<Tensor> gradients() const;
  // The sums of one of the rank's slices, whatever it updates.
  std::vector<Tensor> slice_gradients(int64_t slice) const;
  const Slices& slices() const { return slices_; }

 private:
  struct Unit {
    Tensor all;  // [ranks * slice], of the present lane
    Tensor sum;  // [slice], over ranks and micro batches, if there are sums in each
    std::vector<Tensor> lanes, spare;  // sums of 2^i lanes, or undefined; memory for others
    bool has_sum = false;
    size_t pending = 0;  // leaves whose gradients are not final
  };
  void restart();
  void end_lane();
  void join_lanes(Unit& unit) const;
  void zero_untouched(size_t unit) const;
  void complete_leaf(size_t unit);
  void reduce(size_t unit);

  const ParameterSet& set_;
  Communicator& comm_;
  SideStream& side_;
  const int64_t ranks_;
  const Slices slices_;
  const bool sharded_, sums_each_;
  const std::vector<ParameterPart> parts_;
  std::vector<Unit> units_;
  // A buffer that receives a piece of each rank, the piece that is sent for a unit without
  // gradients, and the gradients of the last unit, which the side stream may still read.
  Tensor received_, zeros_, in_flight_;
  size_t left_ = 0;  // units without a sum in this micro batch, the first ones
  int64_t lane_ = 0;
  bool is_active_ = false, is_summing_ = false;
};

}  // namespace cohort
