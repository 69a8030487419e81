#include "trainers/sharded_weights.h"

#include <algorithm>

#include "core/allocator.h"
#include "core/sizes.h"
#include "trainers/across_ranks.h"

namespace cohort {

ShardedWeights::ShardedWeights(const ParameterSet& set, Communicator& comm, SideStream& side,
                               ShardedGradients& gradients)
    : set_(set), comm_(comm), side_(side), gradients_(gradients), blocks_(set.units().size() - 2) {
  for (size_t unit = 1; unit <= blocks_; ++unit) add_regions(unit);
}

void ShardedWeights::add_regions(size_t unit) {
  constexpr int64_t kAlignment = 256;  // bytes
  const int64_t size = static_cast<int64_t>(dtype_size(set_.dtype())), ranks = comm_.size();
  Region trained{.unit = unit, .is_trained = true, .slice = size * set_.slice_size(unit, ranks)},
      frozen{.unit = unit};
  int64_t end = 0;
  const auto add_frozen = [&](const Tensor& t) {
    frozen.leaves.emplace_back(t.reinterpret(DType::kU8), end);
    end = round_up(end + t.nbytes(), kAlignment);
  };
  for (const NamedParameter& p : set_) {
    if (p.unit != unit || p.first_row > 0) continue;
    const Tensor leaf = p.leaf.value().with_padding();
    if (p.quantized_leaf.defined()) {
      add_frozen(p.quantized_leaf.values);
      add_frozen(p.quantized_leaf.scales);
    } else if (!p.trained()) {
      add_frozen(leaf);
    } else if (leaf.dtype() == set_.dtype()) {
      trained.leaves.emplace_back(leaf.reinterpret(DType::kU8), size * p.gradient_begin);
    }
  }
  frozen.slice = round_up(ceil_div(end, ranks), kAlignment);
  const int64_t before = whole_bytes_;
  for (Region* region : {&trained, &frozen}) {
    if (region->leaves.empty()) continue;
    region->begin = whole_bytes_;
    whole_bytes_ += ranks * round_up(region->slice, kAlignment);
    regions_.push_back(std::move(*region));
  }
  longest_ = std::max(longest_, whole_bytes_ - before);
}

void ShardedWeights::allocate() {
  std::vector<Tensor> own;
  for (const Region& region : regions_)
    own.push_back(region.own.defined() ? region.own
                                       : Tensor::empty({region.slice}, DType::kU8, set_.device()));
  for (Slot& slot : slots_)
    if (!slot.memory.defined()) slot.memory = Tensor::empty({longest_}, DType::kU8, set_.device());
  for (size_t i = 0; i < own.size(); ++i) regions_[i].own = own[i];
}

void ShardedWeights::copy_own(Region& region) const {
  const int64_t first = comm_.rank() * region.slice;
  region.own.zero_();  // what is between leaves
  for (const auto& [leaf, at] : region.leaves) {
    const int64_t begin = std::max(first, at),
                  end = std::min(first + region.slice, at + leaf.numel());
    if (begin < end)
      region.own.narrow(0, begin - first, end - begin)
          .copy_(leaf.narrow(0, begin - at, end - begin));
  }
}

void ShardedWeights::shard() {
  if (is_sharded_) return;
  for (Region& region : regions_) {
    copy_own(region);
    for (const auto& [leaf, at] : region.leaves) leaf.rebind({});
  }
  release_whole();
  is_sharded_ = true;
}

void ShardedWeights::release_whole() {
  if (whole_.defined() && !is_dry_run()) allocator(set_.device()).release_to_pool(whole_.raw());
}

void ShardedWeights::gather_all() {
  if (!is_sharded_) return;
  free_gathered();
  try {
    on_all_ranks(comm_, [&] {
      if (whole_.defined() && !is_dry_run() && !allocator(set_.device()).reclaim(whole_.raw()))
        whole_ = {};
      if (!whole_.defined()) whole_ = Tensor::empty({whole_bytes_}, DType::kU8, set_.device());
    });
  } catch (const OutOfMemoryError&) {  // perhaps of another rank
    release_whole();
    throw;
  }
  gather(0, regions_.size(), whole_);
  for (Region& region : regions_) region.own = {};
  is_sharded_ = false;
}

void ShardedWeights::gather(size_t first, size_t last, const Tensor& memory) const {
  const int64_t ranks = comm_.size();
  for (size_t i = first; i < last; ++i) {
    const Region& region = regions_[i];
    const Tensor bytes =
        memory.narrow(0, region.begin - regions_[first].begin, ranks * region.slice);
    Tensor all = bytes.reshape({ranks, region.slice});
    all.select(0, comm_.rank()).copy_(region.own);
    comm_.all_gather(all);
    for (const auto& [leaf, at] : region.leaves) leaf.rebind(bytes.narrow(0, at, leaf.numel()));
  }
}

void ShardedWeights::unbind(size_t unit) const {
  for (const Region& region : regions_)
    if (region.unit == unit)
      for (const auto& [leaf, at] : region.leaves) leaf.rebind({});
}

// Every rank comes here for the same units in the same order.
void ShardedWeights::begin_gather(size_t unit) {
  Slot& slot = slots_[unit % slots_.size()];
  if (slot.unit == unit) return;
  unbind(slot.unit);
  slot.unit = unit;
  const auto regions = std::ranges::equal_range(regions_, unit, {}, &Region::unit);
  const auto first = static_cast<size_t>(regions.begin() - regions_.begin());
  side_.run([&] { gather(first, first + regions.size(), slot.memory); });
}

void ShardedWeights::begin_micro_batch() {
  if (!is_sharded_) return;
  is_active_ = true;
  forward_ = 0;
  backward_ = blocks_ + 1;
  begin_gather(1);
}

void ShardedWeights::step_forward() {
  ++forward_;
  side_.wait();
  if (forward_ < blocks_) begin_gather(forward_ + 1);
}

void ShardedWeights::step_backward() {
  gradients_.reduce_from(backward_--);
  // The sums of the unit behind have waited for this gather, and take place beside the block.
  if (set_.units()[backward_ + 1].gradients == 0) side_.wait();
  if (backward_ > 1) begin_gather(backward_ - 1);
}

void ShardedWeights::use(size_t unit) {
  if (!is_active_) return;
  if (forward_ < blocks_) {
    COHORT_CHECK(unit == forward_ + 1, "[sharded_weights] block ", unit, " is used after block ",
                 forward_, "; a micro batch has one forward");
    step_forward();
    return;
  }
  COHORT_CHECK(unit <= backward_, "[sharded_weights] block ", unit, " is used in a backward that ",
               "has passed it; a micro batch has one forward");
  while (backward_ > unit) step_backward();
}

void ShardedWeights::end_micro_batch() {
  if (!is_active_) return;
  while (forward_ < blocks_) step_forward();
  while (backward_ > 1) step_backward();
  is_active_ = false;
}

void ShardedWeights::free_gathered() {
  side_.wait();
  is_active_ = false;
  if (!is_sharded_)
    for (Region& region : regions_) region.own = {};
  for (Slot& slot : slots_) {
    unbind(slot.unit);
    slot = {};
  }
}

std::vector<Tensor> ShardedWeights::weights(const std::vector<ParameterPart>& parts) const {
  const auto size = static_cast<int64_t>(dtype_size(set_.dtype()));
  std::vector<Tensor> out(parts.size());
  for (size_t i = 0; i < parts.size(); ++i)
    for (const Region& region : regions_)
      if (is_sharded_ && region.is_trained && region.unit == parts[i].unit &&
          set_[parts[i].parameter].value.dtype() == set_.dtype())
        out[i] = region.own.narrow(0, size * parts[i].at, size * parts[i].count)
                     .reinterpret(set_.dtype());
  return out;
}

}  // namespace cohort
