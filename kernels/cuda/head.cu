// The fused head on CUDA: chunk by chunk the logits by the row-independent product, then one block
// per token over its row.
#include "kernels/head.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "kernels/cuda/row_softmax.cuh"
#include "kernels/matmul.h"

namespace cohort::kernels::cuda {
namespace {

// The tokens of one chunk.
struct Statistics {
  float *logprob, *entropy, *lse;
};

// One block per token: all threads reduce the token's row of logits, [vocab] f32 in global memory,
// then thread 0 writes three numbers. A target outside the vocabulary gives NaN.
__global__ void __launch_bounds__(kRowThreads)
    logprob_kernel(Statistics out, const float* logits, const int32_t* targets, int64_t vocab,
                   float inverse_temperature) {
  const int64_t t = blockIdx.x;
  const int32_t target = targets[t];
  const float* z = logits + t * vocab;
  __shared__ double sum_of_warp[kRowWarps];
  const RowSoftmax row = row_softmax(z, vocab, inverse_temperature, sum_of_warp);
  if (threadIdx.x > 0) return;
  // One thread writes what all threads know by now; the target's logit is a second read of one
  // float.
  const bool known = target >= 0 && target < vocab;
  const float nan = __int_as_float(0x7fc00000);
  out.logprob[t] = known ? row.logprob(z[target]) : nan;
  out.entropy[t] = known ? row.entropy() : nan;
  out.lse[t] = known ? row.lse() : nan;
}

// The tokens of one chunk; dentropy may be null.
struct TokenGrads {
  const float *dlogprob, *dentropy, *lse, *entropy;
  const int32_t* targets;
};

// What a token's logits have in common, and the gradient of one of them.
struct LogitGrad {
  float inverse_temperature, lse, entropy, dlogprob, dentropy;
  int64_t target;

  __device__ float operator()(float logit, int64_t v) const {
    // d log-prob / dz is one_hot - p, d entropy / dz is -p (log p + H), both over the temperature.
    // The entropy's part is left out where nobody asks for it, and where p is 0 while log p is
    // infinite.
    const float log_p = logit * inverse_temperature - lse, p = expf(log_p);
    const float curve = dentropy != 0 && p > 0 ? dentropy * (log_p + entropy) : 0;
    const float dz = -p * (dlogprob + curve) * inverse_temperature;
    return v == target ? dz + dlogprob * inverse_temperature : dz;
  }
};

// dz may be the logits' own memory. kVector: rows are 16-byte aligned.
template <bool kVector, class T>
__device__ void write_row(T* dz, const float* logits, int64_t vocab, const LogitGrad& grad) {
  constexpr int kN = kVector ? kPackSize<T> : 1, kLoad = kVector ? 4 : 1;
  for (int64_t v = kN * threadIdx.x; v < vocab; v += kN * kRowThreads) {
    // A pack of T is 16 bytes: one access of f32 logits, or two for bf16 gradients.
    Pack<float, kLoad> z[kN / kLoad];
    Pack<T, kN> out;
#pragma unroll
    for (int i = 0; i < kN / kLoad; ++i) z[i] = load_pack<kLoad>(logits + v + i * kLoad);
#pragma unroll
    for (int i = 0; i < kN; ++i) out.v[i] = from_float<T>(grad(z[i / kLoad].v[i % kLoad], v + i));
    store_pack(dz + v, out);
  }
}

// One block per token turns its row of logits into their gradients. Every element depends on itself
// and on the token's numbers only, which the forward has kept: no reduction, and so no barrier. f32
// gradients overwrite the logits, each thread the elements that it has just read.
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    logits_backward_kernel(T* dz, const float* logits, TokenGrads tokens, int64_t vocab,
                           float inverse_temperature) {
  const int64_t t = blockIdx.x;
  dz += t * vocab;
  logits += t * vocab;
  // The token's numbers, read by every thread from the same addresses, stay in registers for the
  // whole row.
  const LogitGrad grad{.inverse_temperature = inverse_temperature,
                       .lse = tokens.lse[t],
                       .entropy = tokens.entropy[t],
                       .dlogprob = tokens.dlogprob[t],
                       .dentropy = tokens.dentropy != nullptr ? tokens.dentropy[t] : 0,
                       .target = tokens.targets[t]};
  // Rows of a vocabulary that is no multiple of a pack start at odd addresses.
  const auto bits = reinterpret_cast<uintptr_t>(dz) | reinterpret_cast<uintptr_t>(logits);
  if (bits % 16 == 0 && vocab % kPackSize<T> == 0)
    write_row<true>(dz, logits, vocab, grad);
  else
    write_row<false>(dz, logits, vocab, grad);
}

// Turns logits into the gradients of x and w, chunk by chunk in ascending order. bf16 gradients of
// logits are kept until there are enough for long products: one of few tokens would read and write
// all of dw for little work.
class HeadBackward {
 public:
  struct Args {
    const Tensor &x, &w, &targets;
    GradOut dx, dw;
    int64_t rows;  // of a chunk
    float inverse_temperature;
  };
  explicit HeadBackward(const Args& args) : args_(args) {
    Tensor& dw = args_.dw.tensor;
    if (args.x.dim(0) == 0 && dw.defined() && args.dw.mode == Grad::kOverwrite) dw.zero_();
    if (args.x.dtype() == accumulate_dtype(args.x.dtype())) return;
    const int64_t kept = head_gradient_tokens(args.x.dim(0), args.rows);
    kept_ = Tensor::empty({kept, args.w.dim(0)}, args.x.dtype(), args.x.device());
  }

  // `logits` of the tokens from `begin` on, which may be overwritten; `tokens` are theirs.
  void add(int64_t begin, Tensor& logits, const TokenGrads& tokens) {
    const int64_t count = logits.dim(0), vocab = logits.dim(1), end = begin + count;
    const int64_t first = kept_.defined() ? begin / kept_.dim(0) * kept_.dim(0) : begin;
    Tensor dz = kept_.defined() ? kept_.narrow(0, begin - first, count) : logits;
    dispatch_device(args_.x.dtype(), "head_backward", [&]<class T>() {
      launch("head_logits_backward", logits_backward_kernel<T>, {blocks_for(count, 1), kRowThreads},
             args_.x.device(), pointer<T>(dz), pointer<float>(std::as_const(logits)), tokens, vocab,
             args_.inverse_temperature);
    });
    if (!kept_.defined())
      products(first, dz);
    else if (end - first == kept_.dim(0) || end == args_.x.dim(0))
      products(first, kept_.narrow(0, 0, end - first));
  }

 private:
  void products(int64_t begin, const Tensor& dz) {
    const int64_t count = dz.dim(0);
    // The wgrad adds up over the parts: the first overwrites or adds as asked, the others add.
    if (args_.dw.tensor.defined())
      matmul(
          {.c = args_.dw.tensor,
           .a = dz,
           .b = args_.x.narrow(0, begin, count),
           .desc = {.a = Transpose::kYes, .out = begin == 0 ? args_.dw.mode : Grad::kAccumulate}});
    if (args_.dx.tensor.defined()) {
      Tensor dx = args_.dx.tensor.narrow(0, begin, count);
      // This dgrad has few rows and a sum over the whole vocabulary: split-K is allowed, so that it
      // fills the device. No log-prob depends on it.
      matmul({.c = dx,
              .a = dz,
              .b = args_.w,
              .desc = {.out = args_.dx.mode, .split_k = SplitK::kAllowed}});
    }
  }

  Args args_;
  Tensor kept_;  // gradients of logits that wait; undefined where they take the logits' place
};

}  // namespace

void head_logprob_forward(const HeadLogprobForward& args) {
  const auto inverse_temperature = static_cast<float>(1 / args.desc.temperature);
  const int64_t vocab = args.w.dim(0);
  const int64_t rows = head_chunk_tokens(vocab, args.desc.chunk_tokens, args.x.device());
  std::optional<HeadBackward> backward;
  if (args.gradients != nullptr)
    backward.emplace(HeadBackward::Args{.x = args.x,
                                        .w = args.w,
                                        .targets = args.targets,
                                        .dx = args.gradients->dx,
                                        .dw = args.gradients->dw,
                                        .rows = rows,
                                        .inverse_temperature = inverse_temperature});
  for_logit_chunks(args.x, args.w, rows, [&](int64_t begin, Tensor& logits) {
    const Statistics out{.logprob = pointer<float>(args.logprob) + begin,
                         .entropy = pointer<float>(args.entropy) + begin,
                         .lse = pointer<float>(args.lse) + begin};
    const int32_t* const targets = pointer<int32_t>(args.targets) + begin;
    launch("head_logprob", logprob_kernel, {blocks_for(logits.dim(0), 1), kRowThreads},
           args.x.device(), out, pointer<float>(std::as_const(logits)), targets, vocab,
           inverse_temperature);
    if (!backward) return;
    if (args.gradients->set_dlogprob) args.gradients->set_dlogprob(begin, logits.dim(0));
    backward->add(begin, logits,
                  {.dlogprob = pointer<float>(args.gradients->dlogprob) + begin,
                   .dentropy = nullptr,
                   .lse = out.lse,
                   .entropy = out.entropy,
                   .targets = targets});
  });
}

void head_logprob_backward(const HeadLogprobBackward& args) {
  const int64_t vocab = args.w.dim(0);
  const int64_t rows = head_chunk_tokens(vocab, args.desc.chunk_tokens, args.x.device());
  HeadBackward backward({.x = args.x,
                         .w = args.w,
                         .targets = args.targets,
                         .dx = args.dx,
                         .dw = args.dw,
                         .rows = rows,
                         .inverse_temperature = static_cast<float>(1 / args.desc.temperature)});
  for_logit_chunks(args.x, args.w, rows, [&](int64_t begin, Tensor& logits) {
    backward.add(
        begin, logits,
        {.dlogprob = pointer<float>(args.dlogprob) + begin,
         .dentropy = args.dentropy.defined() ? pointer<float>(args.dentropy) + begin : nullptr,
         .lse = pointer<float>(args.lse) + begin,
         .entropy = pointer<float>(args.entropy) + begin,
         .targets = pointer<int32_t>(args.targets) + begin});
  });
}

}  // namespace cohort::kernels::cuda
