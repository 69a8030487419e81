// Weights of a model's blocks over ranks, as in ZeRO-3 (Rajbhandari et al. 2020) and FSDP. Between
// updates each rank has all of them. In an update it holds a slice of each block, and the update
// uses the memory of the whole ones; a block is gathered when the forward or the backward comes to
// it, beside the work of the block before. The tables and the end of a model stay whole.
#pragma once

#include <array>
#include <functional>
#include <utility>
#include <vector>

#include "core/non_copyable.h"
#include "distributed/communicator.h"
#include "distributed/side_stream.h"
#include "trainers/shards.h"

namespace cohort {

// Frozen weights are sharded as well, in any format. Every rank makes the same calls in the same
// order: the gathers of a forward with the blocks in ascending order, and those of its backward.
class ShardedWeights : NonCopyable {  // the model's hook holds its address
 public:
  // `gradients` are those of the set, whose sums take place between gathers.
  ShardedWeights(const ParameterSet& set, Communicator& comm, SideStream& side,
                 ShardedGradients& gradients);

  // Allocates the slices and the memory of two gathered blocks, and changes nothing yet.
  void allocate();
  // Releases the memory of whole blocks, if they are: no weight can be read but by use().
  void shard();
  // Gathers all blocks from the slices, which are no longer held, if they are sharded. Every rank
  // calls it. Throws OutOfMemoryError, on all ranks, if there is no memory; they stay sharded.
  void gather_all();
  bool is_sharded() const { return is_sharded_; }

  // Around a micro batch, of which all ranks have the same number: end_micro_batch() makes the
  // calls that its forward and backward have not made.
  void begin_micro_batch();
  void end_micro_batch();
  // To be called before each use of a block's weights; it does nothing but in a micro batch.
  void use(size_t unit);
  // The memory of gathered blocks is freed, and of slices if allocate() was all that succeeded.
  void free_gathered();

  // The weights of these parts (parts_in()) in the rank's slices; undefined where none are held.
  std::vector<Tensor> weights(const std::vector<ParameterPart>& parts) const;
  int64_t whole_bytes() const { return whole_bytes_; }

 private:
  // Tensors of a unit that are cut together, in bytes: trained weights in the dtype of the model,
  // at the places of their gradients, or frozen ones.
  struct Region {
    size_t unit = 0;
    bool is_trained = false;
    int64_t slice = 0;                               // bytes of a rank
    int64_t begin = 0;                               // among those of all regions
    std::vector<std::pair<Tensor, int64_t>> leaves;  // u8 [bytes], and their first byte
    Tensor own;                                      // u8 [slice]
  };
  void add_regions(size_t unit);
  void copy_own(Region& region) const;
  void release_whole();
  // Gathers the regions [first, last) into `memory`, u8, and binds their leaves to it.
  void gather(size_t first, size_t last, const Tensor& memory) const;
  // The unit's leaves have no memory then; unit 0 has none here.
  void unbind(size_t unit) const;
  void begin_gather(size_t unit);
  void step_forward();
  void step_backward();

  const ParameterSet& set_;
  Communicator& comm_;
  SideStream& side_;
  ShardedGradients& gradients_;
  const size_t blocks_;                    // units 1 to blocks_
  std::vector<Region> regions_;            // by unit
  int64_t whole_bytes_ = 0, longest_ = 0;  // bytes of all regions, and of those of one unit
  Tensor whole_;  // u8 [whole_bytes_]; undefined: each leaf has memory of its own
  struct Slot {
    Tensor memory;
    size_t unit = 0;  // that it holds; 0: none
  };
  std::array<Slot, 2> slots_;  // a unit has slot unit % 2
  // The blocks that the forward of a micro batch has come to, and its backward.
  size_t forward_ = 0, backward_ = 0;
  bool is_sharded_ = false, is_active_ = false;
};

}  // namespace cohort
