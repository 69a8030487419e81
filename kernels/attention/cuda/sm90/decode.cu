// attention_decode() in bf16 on sm_90. A decode step is bandwidth-bound with many sequences, and
// latency-bound with few.
//
// An item is one token and up to 16 query heads that share a key head; they are its rows. A block
// takes several items in turn. It rotates the queries and the new key, and loops over the tiles of
// keys of its chunks. The new key and value of the token go to the cache and, without waiting for
// that store, into their tile. Four consumer warps share the rows: each computes S and P for part
// of the keys of a tile and O for part of the head dim. They exchange the row max, P in f32 (for l,
// whose order is that of a single thread that sees all keys) and P in bf16 (for P V) through shared
// memory. Operands are loaded before the first mma of a chain, which would otherwise wait for each
// load in turn.
//
// Three producer warps run ahead of the consumers, into the next items: one loads the inputs of an
// item, and two load keys and values by TMA. There a lane requests a box of one cache block and 64
// columns, whose rows of 128 bytes are swizzled for ldmatrix. So the memory is busy while the
// consumers begin and end an item, whose look-ups and loads depend on each other.
//
// A cache in e4m3 (PagedKV) is loaded in pages of 16 tokens, whose bytes the consumers expand in
// registers, a few at a time. Its loads take half the time, so that the consumers' latency limits
// it: with many items, a single producer warp leaves registers for more blocks.
//
// With few items, the blocks of a cluster share the chunks of the rows: block b takes chunks b,
// b + size, ... of the visible ones. After each round every block combines part of the elements of
// O, reading the chunks in ascending order from the shared memory of the other blocks. A single
// chunk needs a single block and no cluster barrier.
#include <bit>

#include "kernels/attention/cuda/sm90/decode_warp.cuh"
#include "kernels/cuda/sm90/cluster.cuh"

namespace cohort::kernels::cuda {
namespace {

// A thread's slice of the combined O: block b of the cluster has the packs p of 4 columns with p /
// kThreads % blocks = b.
template <class Shape>
struct CombinedSlice {
  ChunkState states[Shape::kPacks];
  Pack<float, 4> o[Shape::kPacks];

  // Combines the chunk in the shared memory of block `from`; `first`: there is no previous chunk.
  __device__ void add_chunk(char* shared, int from, int blocks, bool first) {
#pragma unroll
    for (int i = 0; i < Shape::kPacks; ++i) {
      const int pack = pack_of(i, blocks), row = pack / (Shape::kDim / 4);
      if (row >= Shape::kRows) continue;
      const auto* const remote_state =
          in_block(reinterpret_cast<const float*>(shared + Shape::kStates), from) + 2 * row;
      const auto pair = load_pack<2>(remote_state);
      const ChunkState chunk{pair.v[0], pair.v[1]};
      const auto chunk_o =
          load_pack<4>(in_block(reinterpret_cast<const float*>(shared + Shape::kOutputs), from) +
                       DecodeWarp<Shape>::o_offset(row, pack % (Shape::kDim / 4)));
      if (first) {
        states[i] = chunk;
        o[i] = chunk_o;
        continue;
      }
      const CombineScales by = combine_scales(states[i], chunk);
      states[i] = combine(states[i], chunk, by);
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i].v[e] = combine(o[i].v[e], chunk_o.v[e], by);
    }
  }

  template <class Rule>
  __device__ void store(const DecodeRows& rows, const Rule& rule, int head_dim, int blocks) const {
#pragma unroll
    for (int i = 0; i < Shape::kPacks; ++i) {
      const int pack = pack_of(i, blocks), row = pack / (Shape::kDim / 4);
      const int column = 4 * (pack % (Shape::kDim / 4)), at = row * head_dim + column;
      if (row >= rows.count || column >= head_dim) continue;
      const float factor =
          finish_row(rule, rows.head(row), states[i].row_max_log2, states[i].l).factor;
      Pack<bf16, 4> out;
#pragma unroll
      for (int e = 0; e < 4; ++e) out.v[e] = from_float<bf16>(o[i].v[e] * factor + 0.0f);
      store_pack(rows.o + at, out);
    }
  }

 private:
  static __device__ int pack_of(int i, int blocks) {
    return (i * blocks + static_cast<int>(blockIdx.z)) * Shape::kComputing +
           static_cast<int>(threadIdx.x);
  }
};

// Zeroes rows of values that no query sees: partly written cache blocks may hold anything there.
template <class Shape>
__device__ __forceinline__ void clear_values(char* values, int first) {
  constexpr int kChunks = Shape::kDim / 8;
  for (int i = static_cast<int>(threadIdx.x); i < (Shape::kKeys - first) * kChunks;
       i += Shape::kComputing)
    *reinterpret_cast<uint4*>(values + box_offset<Shape>(first + i / kChunks, i % kChunks)) =
        uint4{};
}
// Likewise for the last page of a tile in e4m3 that has keys, before key `end`; pages behind it are
// not read. Also writes the last key's value, unless `bytes` is null.
template <class Shape>
__device__ __forceinline__ void finish_page(char* values, int end, const char* bytes) {
#pragma unroll 1
  for (int d = static_cast<int>(threadIdx.x); d < Shape::kDim; d += Shape::kComputing)
#pragma unroll 1
    for (int t = bytes == nullptr ? end : end - 1; t < (end + 15) / 16 * 16; ++t)
      values[Pages::value(t, d, Shape::kDim)] = t < end ? bytes[d] : char{0};
}

// Processes the tiles of one chunk, from `tile` on. Returns the next tile of the block.
template <class Shape, class Rule>
__device__ __forceinline__ int decode_chunk(DecodeWarp<Shape>& warp,
                                            const DecodeStages<Shape>& stages,
                                            PipelineState<Shape::kStages>& state,
                                            const DecodeRows& rows, const Rule& rule, int tile,
                                            int blocks) {
  const int chunk = tile / Shape::kChunkTiles;
#pragma unroll 1
  for (; tile < rows.tiles.end && tile / Shape::kChunkTiles == chunk;
       tile = next_tile<Shape>(tile, blocks)) {
    const int key0 = tile * Shape::kKeys;
    const uint32_t key_tile = stages.tile(state.index, 0), value_tile = stages.tile(state.index, 1);
    char* const keys = warp.shared + (key_tile - stages.base);
    // The last key is that of the token itself, if the cache has a slot for it.
    const int new_row = rows.slot >= 0 && tile == rows.tiles.end - 1 ? rows.end_key - 1 - key0 : -1;
    stages.pipeline.consumer_wait(state, 0);
    if (new_row >= 0) {
      warp.insert(keys, new_row, Shape::kIsE4m3 ? Shape::kKeyBytes : Shape::kNewKey);
      sync_computing<Shape>();
    }
    float s[2 * Shape::kGroupsPerWarp][4];
    warp.scores(s, key_tile, key0, rows, rule);
    sync_computing<Shape>();
    char* const p = Shape::kIsE4m3 ? warp.shared + Shape::kProbabilities : keys;
    warp.probabilities(s, p, rule.exponent, rows.count);
    stages.pipeline.consumer_wait(state, 1);
    char* const values = keys + Shape::kTileBytes;
    const int end = min(Shape::kKeys, rows.end_key - key0);
    if constexpr (Shape::kIsE4m3) {
      if (new_row >= 0 || end % 16 != 0)
        finish_page<Shape>(values, end,
                           new_row < 0 ? nullptr : warp.shared + warp.inputs + Shape::kValueBytes);
    } else {
      if (end < Shape::kKeys) clear_values<Shape>(values, end);
      if (new_row >= 0) warp.insert(values, new_row, Shape::kNewValue);
    }
    sync_computing<Shape>();
    warp.accumulate(p, value_tile, (end + 15) / 16);
    stages.pipeline.consumer_release_fenced(state);
    state.advance();
  }
  return tile;
}

// Computes the block's part of an item.
template <class Shape, class Problem>
__device__ __forceinline__ void decode(DecodeWarp<Shape>& warp, const DecodeStages<Shape>& stages,
                                       PipelineState<Shape::kStages>& state, const DecodeRows& rows,
                                       const Problem& problem) {
  auto [chunks, blocks, tile] = DecodeChunks<Shape>(rows);
  const auto rank = static_cast<int>(blockIdx.z);
  if (rows.blocks == nullptr && rank == 0)
    for (int i = static_cast<int>(threadIdx.x); i < rows.count * problem.head_dim;
         i += Shape::kComputing)
      rows.o[i] = from_float<bf16>(0.0f);
  if (chunks == 0) return;
  warp.prepare(rows, problem);
  const bool has_last = (chunks - 1) % blocks == rank;
  if (has_last && rows.is_first_part) warp.write_to_cache(rows, problem);
  CombinedSlice<Shape> slice;
#pragma unroll 1
  for (int done = 0; done < chunks; done += blocks) {
    if (done + rank < chunks) {
      tile = decode_chunk(warp, stages, state, rows, problem.rule, tile, blocks);
      warp.store_chunk();
    }
    blocks > 1 ? cluster_sync() : sync_computing<Shape>();
    for (int from = 0; from < min(blocks, chunks - done); ++from)
      slice.add_chunk(warp.shared, from, blocks, done + from == 0);
    // Shared memory may be reused, also by the next item, or freed only after all blocks have read
    // it.
    blocks > 1 ? cluster_sync() : sync_computing<Shape>();
  }
  slice.store(rows, problem.rule, problem.head_dim, blocks);
}

// A producer warp loads the inputs of an item, a row of them per lane. Columns beyond the head dim
// stay zero, because loads and rotations write head_dim columns; rows beyond the last may hold
// anything.
template <class Shape>
__device__ __forceinline__ void load_inputs(const DecodeStages<Shape>& stages, char* shared,
                                            const DecodeProblem& p, const DecodeRows& rows,
                                            ProducerState<Shape::kInputs>& state, bool is_first) {
  const int lane = static_cast<int>(threadIdx.x % 32), row_bytes = 2 * p.head_dim;
  const int angle_bytes = p.rope.data == nullptr ? 0 : (p.rope.wide ? 16 : 8) * p.rope.half;
  const int offset = Shape::kFirstInput + state.index * Shape::kInputBytes;
  const bool has_angles = rows.position < p.rope.rows;
  const void* from = nullptr;
  int to = 0, bytes = row_bytes;
  if (lane < rows.count) {
    from = rows.q + lane * p.head_dim;
    to = 2 * lane * Shape::kQueryStride;
  } else if (lane == Shape::kRows || lane == Shape::kRows + 1) {
    from = lane == Shape::kRows ? rows.k : rows.v;
    to = lane == Shape::kRows ? Shape::kNewKey : Shape::kNewValue;
  } else if (lane == Shape::kRows + 2 && angle_bytes > 0 && has_angles) {
    from = p.rope.data + int64_t{rows.position} * (angle_bytes / 4);
    to = Shape::kAngles;
    bytes = angle_bytes;
  }
  stages.inputs.producer_acquire(state);
  // DecodeItem::load() has read inputs that may be prefetched (kernels/common.h); qkv is none.
  if (is_first) wait_on_dependent_grids();
  const bool loads = rows.blocks != nullptr;
  if (lane == 0) {
    *reinterpret_cast<DecodeItem*>(shared + offset + Shape::kItem) = rows;
    stages.inputs.producer_commit_expect_tx(
        state, loads ? (rows.count + 2) * row_bytes + (has_angles ? angle_bytes : 0) : 0);
  }
  __syncwarp();
  if (loads && from != nullptr)
    bulk_load(stages.base + offset + to, from, bytes, stages.inputs.full(state.index));
  state.advance();
  __syncwarp();
}

// Producer warp of keys (0), values (1) or inputs (2). A single one is that of keys in its first
// half, of values in its second one, and of inputs. Loads those of the block's items, `stride`
// apart.
template <class Shape, class Problem>
__device__ __forceinline__ void run_producer(int producer, const CUtensorMap* map,
                                             const DecodeStages<Shape>& stages, char* shared,
                                             const Problem& problem, int first, int stride) {
  const bool loads_inputs = Shape::kOneProducer || producer == 2;
  ProducerState<Shape::kStages> state;
  ProducerState<Shape::kInputs> inputs;
  if (loads_inputs) {
    for (int i = static_cast<int>(threadIdx.x % 32); i < Shape::kInputs * Shape::kInputBytes / 16;
         i += 32)
      reinterpret_cast<uint4*>(shared + Shape::kFirstInput)[i] = uint4{};
    fence_proxy_async();
    __syncwarp();
  }
#pragma unroll 1
  for (int index = first; index < problem.items; index += stride) {
    const DecodeRows rows(problem, index, DecodeItem::load(problem, index), Shape::kKeys);
    if (loads_inputs) load_inputs(stages, shared, problem, rows, inputs, index == first);
    TileProducer<Shape>{map, stages, state, problem, rows}.load_tiles(producer);
  }
}

template <class Shape, class Problem>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    attention_decode_kernel(const __grid_constant__ Problem problem,
                            const __grid_constant__ CUtensorMap k,
                            const __grid_constant__ CUtensorMap v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ char memory[];
  char* const shared = memory + (1024 - shared_address(memory) % 1024) % 1024;
  const int thread = static_cast<int>(threadIdx.x);
  const DecodeStages<Shape> stages{shared_address(shared)};
  if (thread < Shape::kStages) stages.pipeline.init_stage(thread, 1, Shape::kWarps);
  if (thread < Shape::kInputs) stages.inputs.init_stage(thread, 1, Shape::kWarps);
  // Negative: none. A single producer has keys in its first half and values in its second one.
  const int producer = Shape::kOneProducer ? (thread - Shape::kComputing) / 16
                                           : uniform(thread - Shape::kComputing) / 32;
  const CUtensorMap* const map = producer == 0 ? &k : &v;
  if (thread % 16 == 0 && thread >= Shape::kComputing) tma_prefetch(map);
  __syncthreads();
  launch_dependent_grids();
  if (thread < Shape::kComputing || !problem.may_prefetch) wait_on_dependent_grids();
  const int first = static_cast<int>(blockIdx.x), stride = static_cast<int>(gridDim.x);
  if (thread < Shape::kComputing) {
    PipelineState<Shape::kStages> state;
    PipelineState<Shape::kInputs> input;
    DecodeWarp<Shape> warp(shared);
#pragma unroll 1
    for (int index = first; index < problem.items; index += stride) {
      warp.inputs = Shape::kFirstInput + input.index * Shape::kInputBytes;
      stages.inputs.consumer_wait(input);
      const auto item = *reinterpret_cast<const DecodeItem*>(shared + warp.inputs + Shape::kItem);
      decode(warp, stages, state, {problem, index, item, Shape::kKeys}, problem);
      stages.inputs.consumer_release_fenced(input);
      input.advance();
    }
  } else {
    run_producer<Shape>(producer, map, stages, shared, problem, first, stride);
  }
#endif
}

// Tensor map of keys or values [blocks, block_tokens, Hkv, D], or of the pages of one of them.
CUtensorMap make_cache_map(const Tensor& t, int box_tokens) {
  const auto size = [&](int i) { return static_cast<cuuint64_t>(t.dim(i)); };
  if (t.dtype() == DType::kE4M3) {
    const cuuint64_t rows = size(3) / 8, page = kPageTokens * size(3);
    return make_tensor_map({.t = t,
                            .sizes = {128, rows, 1, size(0) * size(1) / kPageTokens * size(2)},
                            .strides = {128, page, page},
                            .box = {128, static_cast<cuuint32_t>(rows), 1, 1}});
  }
  const cuuint64_t head = size(3) * sizeof(bf16), token = size(2) * head, block = size(1) * token;
  return make_tensor_map({.t = t,
                          .sizes = {size(3), size(2), size(1), size(0)},
                          .strides = {head, token, block},
                          .box = {kBoxColumns, 1, static_cast<cuuint32_t>(box_tokens), 1}});
}

// Runs the kernel with clusters of up to `cluster` blocks. Returns false if it does not fit the
// device.
template <class Shape, class Problem>
bool run(const AttentionDecode& args, const Problem& problem, int cluster) {
  const Device device = args.o.device();
  const auto kernel = attention_decode_kernel<Shape, Problem>;
  const auto* const code = reinterpret_cast<const void*>(kernel);
  constexpr KernelNeeds kNeeds{.shared_memory = Shape::kSharedBytes, .compute_capability = 90};
  if (!::cohort::cuda::fits(code, kNeeds, device)) return false;
  while (cluster > 1 && ::cohort::cuda::active_clusters(code, cluster, Shape::kThreads,
                                                        Shape::kSharedBytes, device) == 0)
    cluster /= 2;
  const auto size = static_cast<unsigned>(cluster);
  const int resident =
      ::cohort::cuda::gpu_properties(device).multiprocessors * Shape::kBlocksPerSm / cluster;
  launch("attention_decode", kernel,
         {.grid = dim3(blocks_for(std::min(std::max(resident, 1), problem.items), 1), 1, size),
          .block = Shape::kThreads,
          .shared_bytes = Shape::kSharedBytes,
          .start = Start::kProgrammatic,
          .cluster = dim3(1, 1, size)},
         device, problem, make_cache_map(args.cache.k, problem.box_tokens),
         make_cache_map(args.cache.v, problem.box_tokens));
  return true;
}

// True if the kernel supports the call: bf16 with a cache in bf16 or e4m3, half heads and halves of
// what is rotated of a multiple of 16 bytes, cache blocks of 8, 16, 32, ... tokens (8 rows are the
// period of the swizzle), no tile mask.
bool supports(const AttentionDecode& args) {
  const Tensor& cache = args.cache.k;
  const auto block = static_cast<uint64_t>(cache.dim(1));
  return args.qkv.dtype() == DType::kBF16 && cache.numel() > 0 && cache.dim(3) % 16 == 0 &&
         RopeTable(args.table, cache.dim(3)).half % 8 == 0 && block >= 8 &&
         std::has_single_bit(block) && !args.desc.tiles.defined() &&
         !args.desc.fp8_scales.defined() && vectorized_heads<bf16>(args.o) &&
         aligned(pointer<bf16>(args.qkv), pointer<char>(cache), pointer<char>(args.cache.v),
                 pointer<float>(args.table));
}

}  // namespace

bool attention_decode(const AttentionDecode& args) {
  if (!supports(args)) return false;
  const int64_t tokens = args.o.dim(0), heads = args.o.dim(1), dim = args.o.dim(2),
                block = args.cache.k.dim(1), kv_heads = args.cache.k.dim(2);
  const int64_t parts = (heads / kv_heads + 15) / 16, items = tokens * kv_heads * parts;
  COHORT_CHECK(items < (1 << 28), "[attention_decode] too many tokens and heads: ", args.o.str());
  const bool is_e4m3 = args.cache.k.dtype() == DType::kE4M3;
  DecodeProblem problem{
      .qkv = pointer<bf16>(args.qkv),
      .o = pointer<bf16>(args.o),
      .k_cache = pointer<void>(args.cache.k),
      .v_cache = pointer<void>(args.cache.v),
      .scales = key_scales(args.cache),
      .sequences = pointer<int32_t>(args.sequences),
      .positions = pointer<int32_t>(args.positions),
      .table = page_table(args.cache),
      .rope = RopeTable(args.table, dim),
      .o_stride = args.o.strides()[0],
      .heads = static_cast<int>(heads),
      .kv_heads = static_cast<int>(kv_heads),
      .head_dim = static_cast<int>(dim),
      .parts = static_cast<int>(parts),
      .items = static_cast<int>(items),
      .block_shift = std::countr_zero(static_cast<uint64_t>(block)),
      .box_tokens = static_cast<int>(is_e4m3 ? kPageTokens : std::min(block, attention_tile(dim))),
      .may_prefetch = current_stream(args.o.device()).may_prefetch};
  const int multiprocessors = ::cohort::cuda::gpu_properties(args.o.device()).multiprocessors;
  // Blocks share the chunks of an item while that leaves each block its own multiprocessor.
  constexpr int kMaxClusterSize = 8;  // portable maximum
  const int64_t chunks = (problem.table.capacity() + kAttentionChunk - 1) / kAttentionChunk;
  int cluster = 1;
  while (cluster < kMaxClusterSize && cluster < chunks &&
         2 * problem.items * cluster <= multiprocessors)
    cluster *= 2;
  // With few blocks, more stages per block; with many, more blocks per multiprocessor.
  bool ran = false;
  const auto run_in = [&]<class C>(const auto& call) {
    dispatch_head_dim(dim, [&]<int kDim>() {
      // Few items: more stages per block, instead of several blocks per multiprocessor. In e4m3,
      // whose loads take half the time, more blocks hide the latency of the arithmetic.
      constexpr bool kIsE4m3 = sizeof(C) == 1;
      constexpr int kProducers = kIsE4m3 && kDim <= 128 ? 1 : 3;
      constexpr int kStages = !kIsE4m3 || kDim == 64 ? 3 : kDim == 128 ? 2 : 5;
      constexpr int kMoreStages = kDim == 64 ? 6 : kProducers == 1 ? 5 : kStages;
      ran = problem.items * cluster <= multiprocessors
                ? run<DecodeShape<C, kDim, kMoreStages>>(args, call, cluster)
                : run<DecodeShape<C, kDim, kStages, kProducers>>(args, call, cluster);
    });
  };
  const auto run_with = [&](const auto& call) {
    is_e4m3 ? run_in.template operator()<uint8_t>(call) : run_in.template operator()<bf16>(call);
  };
  with_rule<WindowRule<float>, ModifyRule<float>>(problem, args.desc, dim, tokens, run_with);
  return ran;
}

}  // namespace cohort::kernels::cuda
