// Both passes of the attention backward in bf16, as one kernel: S and dP are matmuls of own by
// streamed rows, and the gradients of the own rows are matmuls of P and dS by streamed rows. A warp
// has 16 or 32 own rows against all streamed ones, so that P and dS go from the accumulators of one
// matmul straight into the operands of the next without passing through shared memory. Streamed
// rows are double-buffered.
#pragma once

#include "kernels/attention/cuda/backward.cuh"

namespace cohort::kernels::cuda {

namespace {

// Sizes derived from the tiles. Shared memory: the two own tiles, two stages of two streamed tiles,
// and for kKeys two stages of per-query data: lse_log2, delta, Philox stream.
template <int kDim, Pass kPass, Tiles kTiles>
struct Layout {
  static constexpr BackwardTiles kSizes = backward_tiles(kDim, kPass, kTiles);
  static constexpr int kRows = kSizes.rows, kWarps = kSizes.warps, kSplit = kSizes.split;
  static constexpr int kStep = kSizes.step, kColumns = kSizes.columns, kBlocks = kSizes.blocks;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kOwn = kSizes.own();
  static constexpr int kWidth = kDim / kSplit;  // gradient columns of a warp
  static constexpr int kRowBytes = 2 * kDim;
  static constexpr int kOwnBytes = kOwn * kRowBytes, kStepBytes = kStep * kRowBytes;
  static constexpr int kStreamed = 2 * kOwnBytes, kQueryData = kStreamed + 4 * kStepBytes;
  static constexpr int kQueryBytes = kStep * 16;
  static constexpr size_t kShared = kSizes.shared_bytes(kDim, kPass);
  static_assert(kShared == kQueryData + (kPass == Pass::kKeys ? 2 * kQueryBytes : 0));
  static_assert(kRows * kColumns <= 64, "keep_bits() has 32 bits for the scores of a lane");
  static_assert(kStep % kColumns == 0 && kColumns % 16 == 0);
  static_assert(kThreads >= kStep, "a thread loads the data of a streamed query");
};

// Loads fragments of 16x16 values from a tile in shared memory, at `row` (a multiple of 8) and
// column 16 k; the lane-dependent part of the addresses is precomputed.
template <int kDim>
struct TileReader {
  uint32_t square_row, square_chunk, paired_row, paired_chunk;

  __device__ TileReader() {
    const uint32_t lane = threadIdx.x % 32, swizzle = lane & 7;
    square_row = (lane & 15) * (2 * kDim);
    square_chunk = ((lane >> 4) ^ swizzle) << 4;
    paired_row = (swizzle + (lane >> 4 << 3)) * (2 * kDim);
    paired_chunk = ((lane >> 3 & 1) ^ swizzle) << 4;
  }
  __device__ static uint32_t at(uint32_t tile, int row) {
    return tile + static_cast<uint32_t>(row * (2 * kDim));
  }

  // Operand A: its rows are rows of the tile.
  __device__ void a(uint32_t (&f)[4], uint32_t tile, int row, int k) const {
    load_matrices(f, at(tile, row) + square_row + (square_chunk ^ static_cast<uint32_t>(32 * k)));
  }

  // Operand B of two adjacent mmas: its columns are rows of the tile.
  __device__ void b(uint32_t (&f)[4], uint32_t tile, int row, int k) const {
    load_matrices(f, at(tile, row) + paired_row + (paired_chunk ^ static_cast<uint32_t>(32 * k)));
  }

  // Operand B whose rows are rows of the tile.
  __device__ void b_straight(uint32_t (&f)[4], uint32_t tile, int row, int k) const {
    load_matrices_transposed(
        f, at(tile, row) + square_row + (square_chunk ^ static_cast<uint32_t>(32 * k)));
  }
};

// f32 accumulators of a warp: kRows x kColumns / 8 tiles of 16x8.
template <int kRows, int kColumns>
using Accumulators = float[kRows][kColumns / 8][4];
// Accumulator values as operand A of a matmul over the columns.
template <int kRows, int kColumns>
using OperandA = uint32_t[kRows][kColumns / 16][4];

// s = own rows times streamed rows, over the head dim.
template <int kDim, int kRows, int kColumns>
__device__ __forceinline__ void scores(Accumulators<kRows, kColumns>& s,
                                       const TileReader<kDim>& reader, uint32_t own,
                                       uint32_t streamed) {
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[r][n][i] = 0;
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t a[kRows][4];
#pragma unroll
    for (int r = 0; r < kRows; ++r) reader.a(a[r], own, 16 * r, k);
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      uint32_t b[4];
      reader.b(b, streamed, 16 * n, k);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        mma_bf16(s[r][2 * n], a[r], b[0], b[1]);
        mma_bf16(s[r][2 * n + 1], a[r], b[2], b[3]);
      }
    }
  }
}

// acc += operand times streamed rows.
template <int kDim, int kWidth, int kRows, int kColumns>
__device__ __forceinline__ void accumulate_matmul(Accumulators<kRows, kWidth>& acc,
                                                  const OperandA<kRows, kColumns>& a,
                                                  const TileReader<kDim>& reader,
                                                  uint32_t streamed) {
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k)
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n) {
      uint32_t b[4];
      reader.b_straight(b, streamed, 16 * k, n);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        mma_bf16(acc[r][2 * n], a[r][k], b[0], b[1]);
        mma_bf16(acc[r][2 * n + 1], a[r][k], b[2], b[3]);
      }
    }
}

// Starts the copy of rows [row0, row0 + kCount); rows from `length` on become zero.
template <int kDim, int kCount, int kThreads>
__device__ __forceinline__ void load_rows(uint32_t tile, const HeadRows<const bf16>& from, int row0,
                                          int length, int head_dim, bool vectorized) {
  constexpr int kChunks = kDim / 8, kAtOnce = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kCount % kAtOnce == 0);
  const int chunk = static_cast<int>(threadIdx.x) % kChunks;
  const int first = static_cast<int>(threadIdx.x) / kChunks;
  if (vectorized) {  // hoisted out of the inner loop
    const KeyOffsets& offset = from.offset;
    const bf16* source = from.data + (row0 + first) * offset.stride + 8 * chunk;
    const int end = 8 * chunk < head_dim ? length - row0 : 0;
#pragma unroll
    for (int r = first; r < first + kCount; r += kAtOnce, source += kAtOnce * offset.stride) {
      const bf16* const row = source + (row0 + r < offset.own ? 0 : offset.shift);
      copy_async(tile + chunk_offset<kDim>(r, chunk), r < end ? row : nullptr, r < end ? 16 : 0);
    }
    return;
  }
#pragma unroll 1
  for (int r = first; r < kCount; r += kAtOnce)
    load_chunk<kDim>(tile, r, chunk, row0 + r < length ? from.row(row0 + r) : nullptr, head_dim,
                     false);
}

template <int kDim, Pass kPass, Tiles kTiles, class Args>
class BackwardBlock {
 public:
  __device__ BackwardBlock(const Args& args, const BackwardSlice& slice, unsigned char* shared)
      : args_(args),
        slice_(slice),
        shared_(shared),
        base_(shared_address(shared)),
        group_(static_cast<int>(threadIdx.x) % 32 / 4),
        quad_(static_cast<int>(threadIdx.x) % 4),
        own_row_(static_cast<int>(threadIdx.x) / 32 % (L::kWarps / L::kSplit) * 16 * kRows),
        row0_(slice.own + own_row_),
        keys_(slice.sequence.keys()),
        column_(static_cast<int>(threadIdx.x) / 32 / (L::kWarps / L::kSplit) * L::kWidth) {}
  // Loops over steps, for kKeys over the heads of the slice, and over the sequences whose queries
  // see the own keys.
  __device__ void run() {
    const int begin = kKeys ? args_.slice_begin(slice_.head_slice) : 0;
    const int heads = kKeys ? args_.slice_begin(slice_.head_slice + 1) - begin : 1;
    const int first_head =
        kKeys ? slice_.head * args_.group() + begin : slice_.head / args_.group();
    BackwardStream stream = slice_.stream;
    int head = first_head, step = stream.steps.first, sequence = slice_.index;
    if (Rule::kMasks && step >= stream.steps.end) return;
    load_own();
    load_stage(0, stream, head, step);
    copy_async_commit();
    if constexpr (!kKeys) load_own_statistics();
    for (int stage = 0; head < first_head + heads; stage ^= 1) {
      BackwardStream next = stream;
      int next_head = head, next_step = following(step, stream);
      if (next_step == stream.steps.end) {
        next_step = stream.steps.first;
        ++next_head;
      }
      if (kKeys && next_head == first_head + heads &&
          next_stream(args_, slice_, sequence, next, L::kOwn, kStep)) {
        next_head = first_head;
        next_step = next.steps.first;
      }
      copy_async_wait<0>();
      __syncthreads();  // this stage is full, and the other one empty
      if (next_head < first_head + heads) {
        load_stage(stage ^ 1, next, next_head, next_step);
        copy_async_commit();
      }
#pragma unroll 1
      for (int offset = 0; offset < kStep; offset += kColumns)
        process_step(stage, stream, args_.rule.bind(sequence, kKeys ? head : slice_.head, keys_),
                     kKeys ? head : slice_.head, step * kStep + offset, offset);
      stream = next;
      head = next_head;
      step = next_step;
    }
  }

  __device__ void store() const {
    if constexpr (kKeys) {
      if (args_.head_slices > 1) {
        store_slice(dk_dq_, args_.dk_slices, args_.rule.scale);
        store_slice(dv_, args_.dv_slices, 1.0f);
        return;
      }
      store(dk_dq_, args_.dk, args_.rule.scale, args_.accumulate_k);
      store(dv_, args_.dv, 1.0f, args_.accumulate_v);
    } else {
      store(dk_dq_, args_.dq, args_.rule.scale, args_.accumulate_q);
    }
  }

 private:
  using L = Layout<kDim, kPass, kTiles>;
  using Rule = decltype(Args::rule);
  static constexpr int kRows = L::kRows, kColumns = L::kColumns, kStep = L::kStep;
  static constexpr bool kKeys = kPass == Pass::kKeys;
  using Scores = Accumulators<kRows, kColumns>;

  __device__ void load_own() const {
    const auto load = [&](uint32_t tile, const Heads<const bf16>& tensor) {
      const auto rows = tensor.rows(slice_.sequence.begin, slice_.head);
      load_rows<kDim, L::kOwn, L::kThreads>(tile, rows, slice_.own, slice_.sequence.length,
                                            args_.head_dim, args_.vectorized);
    };
    load(base_, kKeys ? args_.k : args_.q);
    load(base_ + L::kOwnBytes, kKeys ? args_.v : args_.dout);
  }

  __device__ void load_stage(int stage, const BackwardStream& stream, int head, int step) const {
    const int row0 = step * kStep;
    const uint32_t tile = base_ + L::kStreamed + stage * (2 * L::kStepBytes);
    const auto load = [&](uint32_t to, const Heads<const bf16>& tensor) {
      const auto rows =
          kKeys ? tensor.rows(stream.begin, head) : tensor.keys(slice_.sequence, head);
      load_rows<kDim, kStep, L::kThreads>(to, rows, row0, stream.length, args_.head_dim,
                                          args_.vectorized);
    };
    load(tile, kKeys ? args_.q : args_.k);
    load(tile + L::kStepBytes, kKeys ? args_.dout : args_.v);
    const int r = static_cast<int>(threadIdx.x);
    if (!kKeys || r >= kStep) return;
    // Queries beyond the end are all zeros: P = 1, but dO = 0 and dS = 0.
    const int live = row0 + r < stream.length ? 1 : 0;
    const int64_t token = stream.begin + (live != 0 ? row0 + r : 0);
    const int64_t at = head * args_.tokens + token;
    copy_async_small<4>(shared_address(lse_log2(stage, r)), args_.lse_log2 + at, 4 * live);
    copy_async_small<4>(shared_address(deltas(stage, r)), args_.delta + at, 4 * live);
    if constexpr (Rule::kDrops)
      if (args_.rule.drops())
        copy_async_small<8>(shared_address(streams(stage, r)), args_.streams + token, 8 * live);
  }

  __device__ void load_own_statistics() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(r, 2 * half);
        const int64_t at = slice_.head * args_.tokens + slice_.sequence.begin + row;
        const bool live = row < slice_.sequence.length;
        lse_log2_[r][half] = live ? args_.lse_log2[at] : 0.0f;
        delta_[r][half] = live ? args_.delta[at] : 0.0f;
      }
      if constexpr (Rule::kDrops) {
        if (!args_.rule.drops()) continue;
        const int row = row_of(r, 2 * (quad_ % 2));
        stream_[r] = row < slice_.sequence.length ? args_.streams[slice_.sequence.begin + row] : 0;
      }
    }
  }

  // The step after `step`.
  __device__ int following(int step, const BackwardStream& stream) const {
    return next_step<kPass>(args_.rule, {slice_.own, slice_.own + L::kOwn}, step + 1,
                            stream.steps.end, kStep);
  }

  // Processes streamed rows [column0, column0 + kColumns), which begin at row `offset` of the
  // stage. `head`: head of the queries, to which `rule` is bound.
  __device__ __forceinline__ void process_step(int stage, const BackwardStream& stream,
                                               const Rule& rule, int head, int column0,
                                               int offset) {
    if (row0_ >= slice_.sequence.length || column0 >= stream.length) return;
    const int last_query = kKeys ? column0 + kColumns - 1 : row0_ + 16 * kRows - 1;
    if (rule.is_later(position(stream, last_query), kKeys ? row0_ : column0)) return;
    const uint32_t own = base_ + own_row_ * L::kRowBytes;
    const uint32_t streamed =
        base_ + L::kStreamed + stage * (2 * L::kStepBytes) + offset * L::kRowBytes;
    const uint32_t columns = 2 * column_;  // in bytes
    Scores s, dp;
    OperandA<kRows, kColumns> a;
    const auto round = [&](auto&& value) {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; i += 2)
            a[r][n / 2][n % 2 * 2 + i / 2] = pack_bf16(value(r, n, i), value(r, n, i + 1));
    };
    scores<kDim, kRows, kColumns>(s, reader_, own, streamed);
    probabilities(s, rule, stage, stream, column0, offset);
    uint32_t keep = ~0u;
    if constexpr (Rule::kDrops)
      if (args_.rule.drops()) keep = keep_bits(stage, head, column0, offset);
    const auto dropped = [&](float x, int r, int n, int i) {
      if constexpr (Rule::kDrops)
        return (keep & bit_of(r, n, i)) != 0 ? x * args_.rule.drop.factor : 0.0f;
      else
        return x;
    };
    if constexpr (kKeys) {
      round([&](int r, int n, int i) { return dropped(s[r][n][i], r, n, i); });
      accumulate_matmul<kDim, L::kWidth, kRows, kColumns>(dv_, a, reader_,
                                                          streamed + L::kStepBytes + columns);
    }
    scores<kDim, kRows, kColumns>(dp, reader_, own + L::kOwnBytes, streamed + L::kStepBytes);
    const auto delta = [&](int r, int n, int i) {
      return kKeys ? query_pair(deltas(stage, offset), n).v[i % 2] : delta_[r][i / 2];
    };
    if constexpr (Rule::kModifies) {
      for_elements([&](int r, int n, int i) {
        dp[r][n][i] = dropped(dp[r][n][i], r, n, i) - delta(r, n, i);
      });
      rule.differentiate([&](auto&& derivative) {
        for_elements([&](int r, int n, int i) {
          dp[r][n][i] *= derivative(s[r][n][i], query_lse(stage, offset, r, n, i),
                                    distance(stream, column0, r, n, i));
        });
      });
      round([&](int r, int n, int i) { return s[r][n][i] * dp[r][n][i]; });
    } else {
      round([&](int r, int n, int i) { return s[r][n][i] * (dp[r][n][i] - delta(r, n, i)); });
    }
    accumulate_matmul<kDim, L::kWidth, kRows, kColumns>(dk_dq_, a, reader_, streamed + columns);
  }

  // Calls fn(r, n, i) for the elements of the accumulators.
  template <class F>
  __device__ __forceinline__ static void for_elements(F&& fn) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) fn(r, n, i);
  }
  // From the query to the key of an element.
  __device__ __forceinline__ KeyDistance<float> distance(const BackwardStream& stream, int column0,
                                                         int r, int n, int i) const {
    const int column = column0 + column_of(0, 0), row = row_of(r, i);
    if constexpr (kKeys)
      return KeyDistance<float>(row - position(stream, column)) + -(8 * n + i % 2);
    else
      return KeyDistance<float>(column - position(stream, row)) + (8 * n + i % 2);
  }

  // S becomes P, zero where masked and beyond the last key. Most
  // tiles are fully visible and return before the loop that checks each element. Own keys beyond
  // the last one may hold anything: their gradients are not stored.
  __device__ __forceinline__ void probabilities(Scores& s, const Rule& rule, int stage,
                                                const BackwardStream& stream, int column0,
                                                int offset) const {
    if constexpr (Rule::kModifies)
      rule.modify([&](auto&& stage_of_rule) {
        for_elements([&](int r, int n, int i) {
          s[r][n][i] = stage_of_rule(s[r][n][i], distance(stream, column0, r, n, i));
        });
      });
    for_elements([&](int r, int n, int i) {
      s[r][n][i] =
          fast_exp2(__fmaf_rn(s[r][n][i], rule.exponent, -query_lse(stage, offset, r, n, i)));
    });
    const IndexRange<int> own{row0_, row0_ + 16 * kRows}, streamed{column0, column0 + kColumns};
    const IndexRange<int>&queries = kKeys ? streamed : own, &keys = kKeys ? own : streamed;
    const int all_keys = kKeys ? slice_.sequence.length : stream.length;
    const bool crosses_end = !kKeys && keys.end > all_keys;
    if (!crosses_end &&
        rule.sees_all({position(stream, queries.first), position(stream, queries.end)}, keys))
      return;
    for_elements([&](int r, int n, int i) {
      const int row = row_of(r, i), column = column0 + column_of(n, i);
      const int key = kKeys ? row : column, query = kKeys ? column : row;
      const bool hidden = rule.masked(position(stream, query), key);
      s[r][n][i] = hidden || key >= all_keys ? 0 : s[r][n][i];
    });
  }

  // Position of a query row.
  __device__ int position(const BackwardStream& stream, int row) const {
    return kKeys ? stream.position + row : slice_.sequence.position(row);
  }

  // Bit mask of the probabilities that dropout keeps. One Philox call covers four adjacent keys, so
  // lanes slice the calls: each computes one per accumulator, and the others get its result by a
  // shuffle.
  __device__ __forceinline__ uint32_t keep_bits(int stage, int head, int column0,
                                                int offset) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    uint32_t bits = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        if constexpr (kKeys) {
          // Four groups slice four calls: call i covers element i of each.
          const int call_index = group_ % 4;
          const uint64_t stream = *streams(stage, offset + column_of(n, call_index));
          const int key = row0_ + 16 * r + 8 * (call_index / 2) + group_ / 4 * 4;
          const uint32_t four = args_.rule.drop.keep_four(stream, head, key);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const uint32_t call = __shfl_sync(0xffffffffu, four, (lane & ~12) | i << 2);
            if ((call >> call_index & 1) != 0) bits |= bit_of(r, n, i);
          }
        } else {
          // Two quads slice the calls for rows group and group + 8.
          const int key = column0 + 8 * n + quad_ / 2 * 4;
          const uint32_t four = args_.rule.drop.keep_four(stream_[r], head, key);
          const uint32_t other = __shfl_xor_sync(0xffffffffu, four, 1);
          const bool odd = quad_ % 2 != 0;
          const uint32_t half[2] = {odd ? other : four, odd ? four : other};
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if ((half[i / 2] >> (2 * (quad_ % 2) + i % 2) & 1) != 0) bits |= bit_of(r, n, i);
        }
      }
    return bits;
  }

  __device__ void store(const Accumulators<kRows, L::kWidth>& grad, const Heads<bf16>& tensor,
                        float scale, bool accumulate) const {
    const auto rows = tensor.rows(slice_.sequence.begin, slice_.head);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const int row = row_of(r, i);
        if (row >= slice_.sequence.length) continue;
        bf16* const out = rows.row(row);
#pragma unroll
        for (int n = 0; n < L::kWidth / 8; ++n) {
          const int column = column_ + column_of(n, 0);
          if (column >= args_.head_dim) continue;
          float low = grad[r][n][i] * scale, high = grad[r][n][i + 1] * scale;
          const bool pair = column + 1 < args_.head_dim;
          if (accumulate) {
            low += to_float(out[column]);
            if (pair) high += to_float(out[column + 1]);
          }
          if (args_.vectorized) {
            *reinterpret_cast<uint32_t*>(out + column) = pack_bf16(low, high);
          } else {
            out[column] = from_float<bf16>(low);
            if (pair) out[column + 1] = from_float<bf16>(high);
          }
        }
      }
  }

  __device__ void store_slice(const Accumulators<kRows, L::kWidth>& grad, float* slices,
                              float scale) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const int row = row_of(r, i);
        if (row >= slice_.sequence.length) continue;
        const int64_t token = slice_.head_slice * args_.tokens + slice_.sequence.begin + row;
        float* const out = slices + (token * args_.kv_heads + slice_.head) * args_.head_dim;
#pragma unroll
        for (int n = 0; n < L::kWidth / 8; ++n) {
          const int column = column_ + column_of(n, 0);
          if (column < args_.head_dim) out[column] = grad[r][n][i] * scale;
          if (column + 1 < args_.head_dim) out[column + 1] = grad[r][n][i + 1] * scale;
        }
      }
  }

  // Row and column of element i of accumulator n of row block r.
  __device__ int row_of(int r, int i) const {
    return row0_ + 16 * r + group_ + 8 * (i / 2);
  }
  __device__ int column_of(int n, int i) const {
    return 8 * n + 2 * quad_ + i % 2;
  }

  // Bit of an element in keep_bits().
  __device__ static uint32_t bit_of(int r, int n, int i) {
    return 1u << (4 * (r * (kColumns / 8) + n) + i);
  }

  // Per-query data of the streamed query `row` of a stage.
  __device__ const float* lse_log2(int stage, int row) const {
    return reinterpret_cast<const float*>(shared_ + L::kQueryData + stage * L::kQueryBytes) + row;
  }
  __device__ const float* deltas(int stage, int row) const {
    return lse_log2(stage, row) + kStep;
  }
  __device__ const uint64_t* streams(int stage, int row) const {
    return reinterpret_cast<const uint64_t*>(lse_log2(stage, 2 * kStep)) + row;
  }

  // lse_log2 of the query of element i of accumulator n of row block r.
  __device__ float query_lse(int stage, int offset, int r, int n, int i) const {
    return kKeys ? query_pair(lse_log2(stage, offset), n).v[i % 2] : lse_log2_[r][i / 2];
  }
  // Values of the queries in the columns of accumulator n; for kKeys.
  __device__ Pack<float, 2> query_pair(const float* data, int n) const {
    return kKeys ? load_pack<2>(data + column_of(n, 0)) : Pack<float, 2>{};
  }

  const Args& args_;
  const BackwardSlice& slice_;
  const unsigned char* shared_;
  const uint32_t base_;  // shared memory address
  const int group_, quad_;
  const int own_row_;  // first own row of the warp, within the tile
  const int row0_;     // the same row, within the sequence
  const int keys_;     // number of keys of the sequence
  const int column_;   // first gradient column of the warp
  const TileReader<kDim> reader_;
  float lse_log2_[kRows][2], delta_[kRows][2];  // own queries, rows group and group + 8
  uint64_t stream_[kRows];                      // own query group + 8 (quad % 2)
  Accumulators<kRows, L::kWidth> dk_dq_ = {};   // dK or dQ, without the scale
  Accumulators<kRows, L::kWidth> dv_ = {};      // dV; unused for kQueries
};

// A block owns a tile of rows of one head of one sequence, keys or queries depending on the pass,
// and streams the rows of the other side in ascending steps. Own and streamed tiles are in shared
// memory, the streamed ones in two stages; scores and gradients stay in registers until the end. No
// other block adds to these gradients, or to this slice of them: there are no atomics, and the
// order is fixed.
template <int kDim, Pass kPass, Tiles kTiles, class Args>
__global__ void __launch_bounds__(Layout<kDim, kPass, kTiles>::kThreads,
                                  Layout<kDim, kPass, kTiles>::kBlocks)
    backward_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(128) unsigned char shared[];
  using L = Layout<kDim, kPass, kTiles>;
  const BackwardSlice slice = find_slice<kPass>(args, static_cast<int>(blockIdx.x), L::kOwn,
                                                L::kStep, tile_blocks<kPass>(args));
  if (slice.own >= slice.sequence.length) return;
  BackwardBlock<kDim, kPass, kTiles, Args> block(args, slice, shared);
  block.run();
  block.store();
}

template <int kDim, Pass kPass>
constexpr size_t backward_shared_bytes(Tiles tiles) {
  return backward_tiles(kDim, kPass, tiles).shared_bytes(kDim, kPass);
}

template <int kDim, Pass kPass, class Args>
void launch_pass(const char* name, const Args& args, Device device) {
  dispatch_tiles<backward_shared_bytes<kDim, kPass>>(device, [&]<Tiles kTiles>() {
    using L = Layout<kDim, kPass, kTiles>;
    launch(name, backward_kernel<kDim, kPass, kTiles, Args>,
           {backward_blocks<kPass>(args, L::kOwn), L::kThreads, L::kShared}, device, args);
  });
}

}  // namespace

// Runs both passes; each padded head dim has its own translation unit.
template <int kDim>
void run_backward_bf16(const BackwardArgs<bf16>& args, const AttentionDesc& desc, Device device) {
  const auto run = [&](const auto& call) {
    launch_pass<kDim, Pass::kKeys>("attention_backward_keys", call, device);
    launch_pass<kDim, Pass::kQueries>("attention_backward_queries", call, device);
  };
  with_rule<PlainRule<float>, DropoutRule<float>>(args, desc, args.head_dim, args.tokens, run);
}

}  // namespace cohort::kernels::cuda
