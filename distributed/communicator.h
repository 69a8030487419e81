// Collective communication between ranks. All ranks call the same collectives in the same order
// with equal shapes and dtypes.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "core/tensor.h"

namespace cohort {

class ProcessGroup;

enum class Reduce { kSum, kMax };

// A collective failed because of another rank, which the message names. The cause is the error of
// that rank.
class PeerError : public Error {
 public:
  using Error::Error;
};

// The rank that throws it has made no progress (ProcessGroup::Options::watchdog).
class HangError : public PeerError {
 public:
  using PeerError::PeerError;
};

// The ranks in sets of `count` that are `step` apart: {1, size} is one set, {1, 4} sets of four
// neighbours, {4, size / 4} those whose numbers are equal modulo 4.
struct RankSets {
  int step = 1, count = 1;
  // The i-th rank of the set that has `rank`, and the place of `rank` there.
  int member(int rank, int i) const { return rank - place(rank) * step + i * step; }
  int place(int rank) const { return rank / step % count; }
};

// Collectives block on the CPU and are ordered by the current stream on CUDA. When a rank fails,
// pending and later calls on the other ranks throw PeerError naming it instead of waiting forever,
// likewise when ranks call different collectives or one exits early. (On CUDA a pending call ends
// with an undefined result, and the next one throws.)
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // The hosts, if each has as many ranks, which are neighbours; else 1.
  virtual int hosts() const { return 1; }
  // t = sum (or max) over ranks: the same bits on every rank and in every run. On the CPU sums are
  // added in a pairwise tree over ranks, ((0+1)+(2+3))+((4+5)+(6+7)), for other sizes split at the
  // largest power of two below; on CUDA in NCCL's order, which depends on the size and the
  // machines. `t` is contiguous, of f64, f32, i64, i32 or bf16 (accumulated in f32 and rounded
  // once).
  virtual void all_reduce(Tensor& t, Reduce op = Reduce::kSum) = 0;
  // Within each set: received[i] = what its rank i has at parts[place of rank()]. Both are
  // [among.count, n] of any one dtype, n the same on every rank, and do not overlap. `received` is
  // contiguous, and so is each row of `parts`.
  virtual void all_to_all(Tensor& received, const Tensor& parts, const RankSets& among) = 0;
  // all[r] = rank r's all[rank()]; `all` is [size, n], contiguous, of any dtype.
  virtual void all_gather(Tensor& all) = 0;
  // Returns when every rank has called it.
  virtual void barrier() = 0;
};

// The communicator of a run with one rank.
std::unique_ptr<Communicator> make_single_communicator();

// Communicator of a rank of `group`, which must outlive it, for tensors on `device` and on the CPU.
// CUDA tensors go through NCCL; CPU tensors, meant for a few numbers, through the group's
// connections. Collective: every rank must call it.
std::unique_ptr<Communicator> make_communicator(ProcessGroup& group, Device device);

// Returns a description of the call, "all_reduce of f32[3]". Throws Error if `t` cannot be reduced.
std::string describe_all_reduce(const Tensor& t, Reduce op);
// Likewise of the other two; `ranks`: all.
std::string describe_all_to_all(const Tensor& received, const Tensor& parts, const RankSets& among);
std::string describe_all_gather(const Tensor& all, int ranks);

// Variables by which NCCL takes one algorithm and protocol, without reduction in the network: the
// order of a sum then depends on the size, the ranks and the machine, not on NCCL's tuning.
inline constexpr std::pair<const char*, const char*> kNcclVariables[] = {
    {"NCCL_ALGO", "Ring"}, {"NCCL_PROTO", "Simple"}, {"NCCL_NVLS_ENABLE", "0"}};
// Sets those that are not set. Only for main(), before the process has other threads.
void pin_nccl_algorithms();

// Runs body(communicator) on `ranks` threads of this process, one per rank, and joins them. The CPU
// threads are divided among the ranks. If bodies throw, the first exception (by time) is rethrown
// after all have ended.
void run_local_ranks(int ranks, const std::function<void(Communicator&)>& body);

namespace cuda {
// The part of make_communicator() for CUDA tensors; `host` performs barriers and collectives on CPU
// tensors. Defined in CUDA builds only.
std::unique_ptr<Communicator> make_nccl_communicator(ProcessGroup& group, Device device,
                                                     std::unique_ptr<Communicator> host);
}  // namespace cuda

}  // namespace cohort
