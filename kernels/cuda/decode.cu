// State of decoded sequences on CUDA: one thread per slot, row or token.
#include "kernels/decode.h"

#include "kernels/cuda/device.cuh"

namespace cohort::kernels::cuda {
namespace {

constexpr int kThreads = 256;

LaunchShape grid_for(int64_t n, Start start = Start::kAfterPrevious) {
  return {.grid = blocks_for(n, kThreads), .block = kThreads, .start = start};
}

__device__ int64_t element() {
  return blockIdx.x * int64_t{kThreads} + threadIdx.x;
}

// One thread per row.
__global__ void decode_inputs_kernel(int32_t* tokens, int32_t* positions, int32_t* active,
                                     int64_t* rng_index, const int32_t* slots, const int32_t* rows,
                                     int64_t n) {
  launch_dependents_and_wait();
  const int64_t i = element();
  if (i >= n) return;
  const int32_t slot = rows[i];
  const int32_t* const state = slots + static_cast<int64_t>(max(slot, 0)) * kSlotColumns;
  const int32_t position = slot < 0 ? -1 : state[kSlotPosition];
  tokens[i] = position < 0 ? 0 : state[kSlotToken];
  positions[i] = max(position, 0);
  active[i] = position < 0 ? -1 : slot;
  rng_index[i] = position + 1;
}

// One thread per row; rows have distinct slots.
__global__ void decode_advance_kernel(int32_t* slots, const int32_t* active, const int32_t* tokens,
                                      const int32_t* stop_tokens, int64_t n, int64_t stops) {
  launch_dependents_and_wait();
  const int64_t i = element();
  if (i >= n || active[i] < 0) return;
  int32_t* const state = slots + static_cast<int64_t>(active[i]) * kSlotColumns;
  const int32_t token = tokens[i], position = state[kSlotPosition] + 1;
  bool ends = token < 0 || position + 1 >= state[kSlotLength];
  for (int64_t k = 0; k < stops; ++k) ends |= token == stop_tokens[active[i] * stops + k];
  state[kSlotToken] = token;
  state[kSlotPosition] = ends ? -1 : position;
}

__global__ void set_elements_kernel(int32_t* t, const int32_t* at, const int32_t* values,
                                    int64_t n) {
  const int64_t i = element();
  if (i < n) t[at[i]] = values[i];
}

__global__ void row_states_kernel(int32_t* states, const int32_t* rows, const int32_t* table,
                                  int64_t n) {
  const int64_t i = element();
  if (i < n) states[i] = rows[i] < 0 ? -1 : table[rows[i]];
}

// A block copies one row of `words` words.
template <class Word>
__global__ void set_rows_kernel(Word* t, const int32_t* at, const Word* rows, int64_t words) {
  const int64_t row = at[blockIdx.x];
  for (int64_t i = threadIdx.x; i < words; i += kThreads)
    t[row * words + i] = rows[blockIdx.x * words + i];
}

// Block (pair, plane) copies one block of the cache.
template <class Word>
__global__ void copy_blocks_kernel(Word* pages, const int32_t* from_to, int64_t blocks,
                                   int64_t words) {
  Word* const plane = pages + blockIdx.y * blocks * words;
  const Word* const from = plane + from_to[2 * blockIdx.x] * words;
  Word* const to = plane + from_to[2 * blockIdx.x + 1] * words;
  for (int64_t i = threadIdx.x; i < words; i += kThreads) to[i] = from[i];
}

// Calls fn with the widest type that divides `bytes` and the addresses' alignment.
template <class F>
void with_words(int64_t bytes, bool is_aligned, F&& fn) {
  if (bytes % 16 == 0 && is_aligned)
    fn.template operator()<Pack<uint32_t, 4>>();
  else if (bytes % 4 == 0)
    fn.template operator()<uint32_t>();
  else
    fn.template operator()<uint16_t>();
}

}  // namespace

void decode_inputs(const DecodeInputs& args) {
  const int64_t n = args.rows.numel();
  launch("decode_inputs", decode_inputs_kernel, grid_for(n, Start::kProgrammatic),
         args.slots.device(), pointer<int32_t>(args.tokens), pointer<int32_t>(args.positions),
         pointer<int32_t>(args.active), pointer<int64_t>(args.rng_index),
         pointer<int32_t>(args.slots), pointer<int32_t>(args.rows), n);
}

void decode_advance(const DecodeAdvance& args) {
  const int64_t n = args.active.numel();
  launch("decode_advance", decode_advance_kernel, grid_for(n, Start::kProgrammatic),
         args.slots.device(), pointer<int32_t>(args.slots), pointer<int32_t>(args.active),
         pointer<int32_t>(args.tokens), pointer<int32_t>(args.stop_tokens), n,
         args.stop_tokens.dim(1));
}

void set_elements(const SetElements& args) {
  const int64_t n = args.at.numel();
  launch("set_elements", set_elements_kernel, grid_for(n), args.t.device(),
         pointer<int32_t>(args.t), pointer<int32_t>(args.at), pointer<int32_t>(args.values), n);
}

void row_states(const RowStates& args) {
  const int64_t n = args.rows.numel();
  launch("row_states", row_states_kernel, grid_for(n), args.states.device(),
         pointer<int32_t>(args.states), pointer<int32_t>(args.rows), pointer<int32_t>(args.table),
         n);
}

void set_rows(const SetRows& args) {
  const int64_t n = args.at.numel();
  if (n == 0) return;
  const int64_t bytes = args.rows.nbytes() / n;
  with_words(bytes, aligned(args.t.raw(), args.rows.raw()), [&]<class Word>() {
    launch("set_rows", set_rows_kernel<Word>, {blocks_for(n, 1), kThreads}, args.t.device(),
           pointer<Word>(args.t), pointer<int32_t>(args.at), pointer<Word>(args.rows),
           bytes / static_cast<int64_t>(sizeof(Word)));
  });
}

void copy_blocks(const CopyBlocks& args) {
  const int64_t planes = args.pages.dim(0), blocks = args.pages.dim(1),
                pairs = args.from_to.numel() / 2, bytes = args.pages.nbytes() / (planes * blocks);
  if (pairs == 0) return;
  with_words(bytes, aligned(args.pages.raw()), [&]<class Word>() {
    launch("copy_blocks", copy_blocks_kernel<Word>,
           {dim3(blocks_for(pairs, 1), static_cast<unsigned>(planes)), kThreads},
           args.pages.device(), pointer<Word>(args.pages), pointer<int32_t>(args.from_to), blocks,
           bytes / static_cast<int64_t>(sizeof(Word)));
  });
}

}  // namespace cohort::kernels::cuda
