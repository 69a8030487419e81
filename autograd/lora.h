// Differentiable parts of linear layers with a low-rank adapter (LoRA, Hu et al. 2021; PEFT calls
// the factors lora_A and lora_B): y = round([x | h] [w | s B]^T + bias), h = round(x A^T), where w
// and the bias are frozen. See kernels/lora.h.
#pragma once

#include <vector>

#include "autograd/ops.h"
#include "kernels/lora.h"

namespace cohort {

// The adapter of a linear layer, or undefined. The layer may have several modules, such as queries
// and keys: each has columns of h, and with them a block of s B, which is 0 elsewhere.
struct Lora {
  using Module = kernels::AdapterSlice;
  Variable a;  // [modules rank, K], behind which P - modules rank rows of zeros are padding
  Variable b;  // [rows of all modules, rank]
  std::vector<Module> modules;
  double scale = 1;

  bool defined() const { return a.defined(); }
  int64_t rank() const { return b.shape()[1]; }
  // P, the columns of h.
  int64_t columns() const { return defined() ? a.value().with_padding().dim(0) : 0; }
};
enum class Adapters : uint8_t { kOn, kOff };

// The input of a linear layer: [x | h], or x alone if there is no adapter; and h again, contiguous
// and for LoraBackward, if it is asked for.
struct LoraInputs {
  Tensor xh, h;
};
// Writes h, or zeros if adapters are off, behind x: into the padding of its rows, which norms and
// attention() make if asked to; else behind a copy of x.
LoraInputs lora_inputs(const Tensor& x, const Lora& lora, Adapters adapters, bool keeps_h);

// The adapter's part of a layer's backward, from dy [T, N]; nothing if `lora` is undefined. The
// gradient of the layer's input is dy w + dh A.
struct LoraBackward {
  Lora lora;
  Tensor h, weight;  // contiguous h [T, P]; [w | s B]

  bool defined() const { return lora.defined(); }
  // Writes the gradient of B and returns dh [T, P], that of h.
  Tensor output_gradients(const Tensor& dy, GradSlot db) const;
  // Writes the gradient of A; x [T, K].
  void input_gradient(const Tensor& dh, const SavedTensor& x, GradSlot da) const;
  // [P, K]
  Tensor a() const { return lora.a.value().with_padding(); }
};

// x[..., K] w[N, K]^T + bias[N] with an adapter. `w`: columns of [w | s B], which are its padding.
Variable lora_linear(const Variable& x, const Variable& w, const Variable& bias, const Lora& lora,
                     Adapters adapters);

}  // namespace cohort
