// Collective communication between ranks. All ranks call the same collectives in the same order
// with equal shapes and dtypes.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "core/tensor.h"

namespace cohort {

enum class Reduce { kSum, kMax };

// Tensors are contiguous. Collectives block on the CPU and are ordered by the current stream on
// CUDA. When a rank fails, the others' pending and later calls throw Error naming it, instead of
// waiting for ever; so do they when ranks call different collectives or one ends early. Sums are of
// f64, f32, i64, i32 and bf16, the last added in f32 and rounded once.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // t = sum (or max) over ranks, added in rank order: the same bits on every rank and in every run.
  virtual void all_reduce(Tensor& t, Reduce op = Reduce::kSum) = 0;
  virtual void broadcast(Tensor& t, int root) = 0;
  // out: [size * n], the ranks' in: [n] one after the other. `in` may be this rank's part of out.
  virtual void all_gather(Tensor& out, const Tensor& in) = 0;
  // out: [n], this rank's part of the sum of the ranks' in: [size * n]. `out` may be that part of
  // in.
  virtual void reduce_scatter(Tensor& out, const Tensor& in) = 0;
  virtual void barrier() = 0;
};

// The communicator of a run with one rank.
std::unique_ptr<Communicator> make_single_communicator();

// Runs body(communicator) on `ranks` threads of this process, one rank each, and joins them. CPU
// threads are shared out among the ranks. If bodies throw, the first exception (by time) is
// rethrown here after all have ended.
void run_local_ranks(int ranks, const std::function<void(Communicator&)>& body);

}  // namespace cohort
