// Pipelines of sm_90, in CUTLASS's words: producers fill the stages of a ring in shared memory, and
// consumers read them. Producers arrive on a stage's full barrier when they have filled it, and
// consumers on its empty barrier when they have read it. Only code for sm_90 and newer may call
// these functions.
#pragma once

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/sm90/tma.cuh"

namespace cohort::kernels::cuda {

// Stage index and barrier phase of an iteration of a pipeline. An iteration's number converts to
// its state; a loop without a number calls advance().
template <int kStages>
struct PipelineState {
  int index = 0;
  uint32_t phase = 0;

  constexpr PipelineState() = default;
  __device__ constexpr PipelineState(int iteration)
      : index(static_cast<int>(static_cast<uint32_t>(iteration) % kStages)),
        phase(static_cast<uint32_t>(iteration) / kStages % 2) {}
  __device__ constexpr void advance() {
    if (++index < kStages) return;
    index = 0;
    phase ^= 1;
  }
};

// State of a producer that does not wait in its first round, when all stages are empty: the first
// release of a stage completes phase 0 of its empty barrier.
template <int kStages>
struct ProducerState : PipelineState<kStages> {
  bool first_round = true;

  __device__ void advance() {
    PipelineState<kStages>::advance();
    first_round = first_round && this->index > 0;
  }
};

// Barriers of a pipeline. Several producers, each with a full barrier, may fill parts of a stage;
// consumers release the stage as a whole.
template <int kStages, int kProducers = 1>
struct Pipeline {
  static constexpr int kBarrierBytes = sizeof(uint64_t);
  static constexpr int kBytes = kBarrierBytes * kStages * (kProducers + 1);
  using State = PipelineState<kStages>;
  uint32_t first;  // shared address of kBytes bytes, a multiple of kBarrierBytes

  __device__ uint32_t full(int stage, int producer = 0) const {
    return first + kBarrierBytes * (producer * kStages + stage);
  }
  __device__ uint32_t empty(int stage) const { return full(stage, kProducers); }
  __device__ uint32_t end() const { return first + kBytes; }

  // One thread initialises the barriers of a stage, or all barriers, with the number of arrivals
  // that complete a phase. See barrier_init().
  __device__ void init_stage(int stage, int full_arrivals, int empty_arrivals) const {
    for (int producer = 0; producer < kProducers; ++producer)
      barrier_init(full(stage, producer), full_arrivals);
    barrier_init(empty(stage), empty_arrivals);
  }
  __device__ void init(int full_arrivals, int empty_arrivals) const {
    for (int stage = 0; stage < kStages; ++stage) init_stage(stage, full_arrivals, empty_arrivals);
  }

  // Waits until the consumers have released the stage's previous contents.
  __device__ __forceinline__ void producer_acquire(const State& state) const {
    barrier_wait(empty(state.index), state.phase ^ 1);
  }
  __device__ __forceinline__ void producer_acquire(const ProducerState<kStages>& state) const {
    if (!state.first_round) barrier_wait(empty(state.index), state.phase ^ 1);
  }
  // The calling thread arrives on the full barrier; _warp: one arrival after all threads of the
  // warp have reached this point; _expect_tx: the phase also waits for `bytes` of tma_load().
  __device__ __forceinline__ void producer_commit(const State& state, int producer = 0) const {
    barrier_arrive(full(state.index, producer));
  }
  __device__ __forceinline__ void producer_commit_warp(const State& state, int producer = 0) const {
    arrive_once_per_warp(full(state.index, producer));
  }
  __device__ __forceinline__ void producer_commit_expect_tx(const State& state, int bytes,
                                                            int producer = 0) const {
    barrier_arrive_expect_tx(full(state.index, producer), bytes);
  }

  // Waits until a producer has filled its part of the stage.
  __device__ __forceinline__ void consumer_wait(const State& state, int producer = 0) const {
    barrier_wait(full(state.index, producer), state.phase);
  }
  // The calling thread arrives on the empty barrier; _warp: as for the producer; _fenced: as _warp,
  // of a stage that TMA fills, after stores to it or loads still in flight; see the fence.
  __device__ __forceinline__ void consumer_release(const State& state) const {
    barrier_arrive(empty(state.index));
  }
  __device__ __forceinline__ void consumer_release_warp(const State& state) const {
    arrive_once_per_warp(empty(state.index));
  }
  __device__ __forceinline__ void consumer_release_fenced(const State& state) const {
    fence_proxy_async();
    consumer_release_warp(state);
  }
};

// Producer of stages by cp.async. A thread commits a stage one group late, so that two groups are
// in flight: when its copies have completed, a proxy fence orders them before reads by the tensor
// cores, and it arrives on the full barrier.
class CpAsyncProducer {
 public:
  // Ends a group of copies, which completes the stage behind `full`.
  __device__ __forceinline__ void commit(uint32_t full) {
    copy_async_commit();
    if (pending_ != 0) {
      copy_async_wait<1>();
      arrive();
    }
    pending_ = full;
  }
  // Waits until a stage is empty. Pending copies are committed first, since the consumers that
  // release the stage may be waiting for them.
  template <class Pipeline>
  __device__ __forceinline__ void acquire(const Pipeline& pipeline,
                                          const typename Pipeline::State& state) {
    if (barrier_is_done(pipeline.empty(state.index), state.phase ^ 1)) return;
    finish();
    pipeline.producer_acquire(state);
  }
  // Commits the pending copies.
  __device__ __forceinline__ void finish() {
    if (pending_ == 0) return;
    copy_async_wait<0>();
    arrive();
    pending_ = 0;
  }

 private:
  __device__ __forceinline__ void arrive() {
    fence_proxy_async();
    barrier_arrive(pending_);
  }
  uint32_t pending_ = 0;  // full barrier of the stage in flight; 0: none
};

}  // namespace cohort::kernels::cuda
