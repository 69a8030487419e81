#include "trainers/shards.h"

#include <algorithm>
#include <utility>

#include "core/sizes.h"
#include "distributed/reduce_scatter.h"
#include "kernels/elementwise.h"

namespace cohort {
namespace {

// The pieces of all ranks, which are exchanged at a time, have this many bytes together.
constexpr int64_t kPieceBytes = int64_t{64} << 20;

// Elements of each rank's piece, of at most `most`.
int64_t piece_elements(int64_t ranks, int64_t element_bytes, int64_t most) {
  constexpr int64_t kAlignment = ParameterSet::kLeafAlignment;
  return std::clamp(kPieceBytes / (ranks * element_bytes) / kAlignment * kAlignment, kAlignment,
                    std::max(most, kAlignment));
}

void add_to(Tensor& sum, const Tensor& x) {
  kernels::scale({.y = sum, .x = x, .factor = 1, .mode = kernels::Grad::kAccumulate});
}

}  // namespace

std::vector<ParameterPart> parts_in(const ParameterSet& set, const Slices& slices) {
  std::vector<ParameterPart> out;
  for (size_t i = 0; i < set.size(); ++i) {
    const NamedParameter& p = set[i];
    if (!p.trained()) continue;
    const int64_t first = slices.begin(set, p.unit) - p.gradient_begin,
                  begin = std::max<int64_t>(0, first),
                  end = std::min(p.value.numel(), first + slices.size(set, p.unit));
    if (begin < end)
      out.push_back({.parameter = i,
                     .unit = p.unit,
                     .begin = begin,
                     .count = end - begin,
                     .at = begin - first});
  }
  return out;
}

PartGather::PartGather(const ParameterSet& set, Communicator& comm, int64_t lanes)
    : set_(set), comm_(comm) {
  for (int rank = 0; rank < comm.size(); ++rank)
    parts_.push_back(parts_in(set, Slices::of_rank(rank, comm.size(), lanes)));
}

int64_t PartGather::memory_bytes(const ParameterSet& set, const Slices& slices) {
  const auto size = static_cast<int64_t>(dtype_size(accumulate_dtype(set.dtype())));
  int64_t longest = 0;
  for (size_t unit = 0; unit < set.units().size(); ++unit)
    longest = std::max(longest, slices.size(set, unit));
  return std::min(kPieceBytes, slices.all / slices.count * size * longest);
}

void PartGather::gather(size_t unit, const Values& values, Tensor memory) const {
  // The parts in question of each rank, one after the other from 0 on.
  std::vector<std::vector<ParameterPart>> rows;
  int64_t longest = 0;
  for (const std::vector<ParameterPart>& parts : parts_) {
    int64_t end = 0;
    std::vector<ParameterPart>& row = rows.emplace_back();
    for (ParameterPart part : parts) {
      if (part.unit != unit || set_[part.parameter].value.dtype() != values.parameter) continue;
      part.at = end;
      end += part.count;
      row.push_back(part);
    }
    longest = std::max(longest, end);
  }
  const auto ranks = static_cast<int64_t>(rows.size());
  const int64_t most =
      piece_elements(ranks, values.width * static_cast<int64_t>(dtype_size(values.dtype)), longest);
  for (int64_t first = 0; first < longest; first += most) {
    const int64_t count = std::min(most, longest - first);
    const Shape shape{ranks, values.width * count};
    const int64_t bytes = shape.numel() * static_cast<int64_t>(dtype_size(values.dtype));
    Tensor all = memory.defined()
                     ? memory.narrow(0, 0, bytes).reinterpret(values.dtype).reshape(shape)
                     : Tensor::empty(shape, values.dtype, set_.device());
    // Calls use(piece, its values) for the pieces of a rank.
    const auto for_pieces = [&](int64_t rank, const auto& use) {
      for (ParameterPart piece : rows[static_cast<size_t>(rank)]) {
        const int64_t begin = std::max(piece.at, first),
                      end = std::min(piece.at + piece.count, first + count);
        if (begin >= end) continue;
        piece.begin += begin - piece.at;
        piece.count = end - begin;
        use(piece, all.select(0, rank).narrow(0, values.width * (begin - first),
                                              values.width * piece.count));
      }
    };
    for_pieces(comm_.rank(),
               [&](const ParameterPart& piece, Tensor to) { to.copy_(values.mine(piece)); });
    comm_.all_gather(all);
    for (int64_t rank = 0; rank < ranks; ++rank) for_pieces(rank, values.store);
  }
}

ShardedGradients::ShardedGradients(const ParameterSet& set, Communicator& comm, SideStream& side,
                                   Sharding sharding, int64_t lanes)
    : set_(set),
      comm_(comm),
      side_(side),
      ranks_(comm.size()),
      slices_(Slices::of_rank(comm.rank(), comm.size(), lanes)),
      sharded_(ranks_ > 1 && is_sharded(sharding)),
      sums_each_(ranks_ > 1 && cohort::sums_each_micro_batch(sharding)),
      parts_(parts_in(set, sharded_ ? slices_ : Slices())),
      units_(set.units().size()) {
  for (size_t unit = 0; unit < units_.size(); ++unit)
    for (size_t i = set.units()[unit].first_leaf; i < set.units()[unit].end_leaf; ++i) {
      set.trained()[i].on_gradient([this, unit] { complete_leaf(unit); });
      set.trained()[i].on_missing_gradient([this, unit] {
        if (is_active_ && sums_each_) units_[unit].all = set_.allocate_gradients(unit, slices_.all);
      });
    }
}

void ShardedGradients::allocate() {
  const DType dtype = accumulate_dtype(set_.dtype());
  int64_t longest = 0;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    const int64_t slice = slices_.size(set_, unit);
    longest = std::max(longest, slice);
    if (sums_each_)
      units_[unit].sum = Tensor::empty({slice}, dtype, set_.device());
    else
      units_[unit].all = set_.allocate_gradients(unit, slices_.all);
    for (int64_t lane = 1; lane < slices_.count; lane *= 2)
      units_[unit].spare.push_back(Tensor::empty({ranks_ * slice}, dtype, set_.device()));
  }
  const int64_t piece =
      ranks_ * piece_elements(ranks_, static_cast<int64_t>(dtype_size(dtype)), longest);
  if (ranks_ > 1) received_ = Tensor::empty({piece}, dtype, set_.device());
  if (sums_each_) zeros_ = Tensor::zeros({piece}, dtype, set_.device());
  is_active_ = true;
  lane_ = 0;
  restart();
}

std::vector<Tensor> ShardedGradients::allocate_most() const {
  std::vector<Tensor> out;
  if (!sums_each_) return out;
  const auto smaller = [&](size_t a, size_t b) {
    return slices_.size(set_, a) < slices_.size(set_, b);
  };
  const size_t end = units_.size() - 1;
  size_t block = std::min<size_t>(1, end);
  for (size_t unit = block; unit < end; ++unit) block = std::max(block, unit, smaller);
  for (const size_t unit : {std::max<size_t>(0, end, smaller), block, block})
    out.push_back(set_.allocate_gradients(unit, slices_.all));
  return out;
}

void ShardedGradients::free() {
  if (is_active_) side_.wait();
  is_active_ = is_summing_ = false;
  for (Unit& unit : units_) unit = {};
  received_ = zeros_ = in_flight_ = {};
  set_.free_gradients();
}

void ShardedGradients::restart() {
  left_ = units_.size();
  for (size_t unit = 0; unit < units_.size(); ++unit)
    units_[unit].pending = set_.units()[unit].end_leaf - set_.units()[unit].first_leaf;
}

void ShardedGradients::begin_micro_batch(bool is_last, int64_t lane) {
  while (lane_ < lane) end_lane();
  is_summing_ = sums_each_ || (is_last && lane_ + 1 == slices_.count);
  if (sums_each_) restart();
}

// Joins the lane with those before it, as far as they complete a power of two.
void ShardedGradients::end_lane() {
  for (size_t index = 0; index < units_.size(); ++index) {
    Unit& unit = units_[index];
    if (unit.all.numel() == 0) continue;
    zero_untouched(index);
    size_t level = 0;
    for (; (lane_ >> level & 1) != 0; ++level) {
      add_to(unit.all, unit.lanes[level]);
      unit.spare.push_back(std::exchange(unit.lanes[level], {}));
    }
    unit.lanes.resize(std::max(unit.lanes.size(), level + 1));
    unit.lanes[level] = std::exchange(unit.all, unit.spare.back());
    unit.spare.pop_back();
    set_.set_gradients(index, unit.all);
  }
  ++lane_;
}

void ShardedGradients::join_lanes(Unit& unit) const {
  for (const Tensor& sum : unit.lanes)
    if (sum.defined()) add_to(unit.all, sum);
  unit.lanes.clear();
}

void ShardedGradients::zero_untouched(size_t unit) const {
  for (size_t i = set_.units()[unit].first_leaf; i < set_.units()[unit].end_leaf; ++i)
    set_.trained()[i].grad();
}

void ShardedGradients::end_micro_batch() {
  if (sums_each_) reduce_from(0);
  is_summing_ = false;
}

void ShardedGradients::complete_leaf(size_t unit) {
  if (!is_active_ || !is_summing_) return;
  COHORT_CHECK(units_[unit].pending > 0 && unit < left_, "[gradients] a gradient of unit ", unit,
               " is final twice, or after its sum has begun");
  --units_[unit].pending;
  while (left_ > 0 && units_[left_ - 1].pending == 0) reduce(--left_);
}

// A rank that has made no backward, or no leaf of which a loss depends on, has zeros.
void ShardedGradients::reduce_from(size_t unit) {
  while (left_ > unit) reduce(--left_);
}

void ShardedGradients::finish() {
  while (lane_ + 1 < slices_.count) end_lane();
  if (!sums_each_) reduce_from(0);
  side_.wait();
  for (Unit& unit : units_)
    if (sums_each_ && !unit.has_sum) unit.sum.zero_();
}

void ShardedGradients::reduce(size_t index) {
  Unit& unit = units_[index];
  const int64_t slice = slices_.size(set_, index);
  if (unit.all.defined()) zero_untouched(index);
  join_lanes(unit);
  if (ranks_ == 1 || slice == 0) return;
  const int64_t most = received_.numel() / ranks_;
  Tensor target = sums_each_ ? unit.sum : unit.all.narrow(0, comm_.rank() * slice, slice);
  const kernels::Grad mode = std::exchange(unit.has_sum, sums_each_) ? kernels::Grad::kAccumulate
                                                                     : kernels::Grad::kOverwrite;
  const auto sum = [&] {
    for (int64_t first = 0; first < slice; first += most) {
      const int64_t count = std::min(most, slice - first);
      const Tensor parts = unit.all.defined()
                               ? unit.all.reshape({ranks_, slice}).narrow(1, first, count)
                               : zeros_.narrow(0, 0, ranks_ * count).reshape({ranks_, count});
      Tensor y = target.narrow(0, first, count);
      reduce_scatter(comm_, parts, received_, {y, mode});
    }
    if (sharded_) return;
    Tensor all = unit.all.reshape({ranks_, slice});
    comm_.all_gather(all);
  };
  if (sums_each_) side_.wait();
  in_flight_ = {};
  side_.run(sum);
  if (!sums_each_) return;
  in_flight_ = std::exchange(unit.all, {});
  set_.free_gradients(index);
}

std::vector<Tensor> ShardedGradients::gradients() const {
  std::vector<Tensor> out;
  for (const ParameterPart& part : parts_) {
    const Unit& unit = units_[part.unit];
    const int64_t begin = sharded_ && !sums_each_ ? slices_.begin(set_, part.unit) : 0;
    out.push_back((sums_each_ ? unit.sum : unit.all).narrow(0, begin + part.at, part.count));
  }
  return out;
}

std::vector<Tensor> ShardedGradients::slice_gradients(int64_t slice) const {
  const Slices one{slices_.first + slice, 1, slices_.all};
  std::vector<Tensor> out;
  for (const ParameterPart& part : parts_in(set_, one)) {
    const Unit& unit = units_[part.unit];
    const int64_t begin = sums_each_ ? 0 : one.begin(set_, part.unit);
    out.push_back((sums_each_ ? unit.sum : unit.all).narrow(0, begin + part.at, part.count));
  }
  return out;
}

}  // namespace cohort
