// Collective communication between ranks. All ranks call the same collectives in the same order
// with equal shapes and dtypes.
#pragma once

#include <functional>
#include <memory>

#include "core/tensor.h"

namespace cohort {

class ProcessGroup;

enum class Reduce { kSum, kMax };

// A call that cannot take place because of another rank; the message names it. Its own error is
// the cause, and this one only its echo.
class PeerError : public Error {
 public:
  using Error::Error;
};

// Collectives block on the CPU and are ordered by the current stream on CUDA. When a rank fails,
// the others' pending and later calls throw PeerError naming it, instead of waiting for ever; so do
// they when ranks call different collectives or one ends early. (On CUDA a pending call ends, with
// whatever is in its tensor, and the next one throws.)
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // t = sum (or max) over ranks: the same bits on every rank and in every run. On the CPU it is
  // added in rank order; on CUDA in NCCL's order, which follows from the size and the machines. `t`
  // is contiguous, of f64, f32, i64, i32 or bf16, the last added in f32 and rounded once.
  virtual void all_reduce(Tensor& t, Reduce op = Reduce::kSum) = 0;
  // Returns when every rank has called it.
  virtual void barrier() = 0;
};

// The communicator of a run with one rank.
std::unique_ptr<Communicator> make_single_communicator();

// The communicator of a rank of `group`, which must outlive it: for tensors of `device` and of the
// CPU. Those of CUDA go through NCCL, those of the CPU, meant for a few numbers, through the
// group's connections. A collective call: every rank makes it.
std::unique_ptr<Communicator> make_communicator(ProcessGroup& group, Device device);

// Runs body(communicator) on `ranks` threads of this process, one rank each, and joins them. CPU
// threads are shared out among the ranks. If bodies throw, the first exception (by time) is
// rethrown here after all have ended.
void run_local_ranks(int ranks, const std::function<void(Communicator&)>& body);

}  // namespace cohort
