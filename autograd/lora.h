// Differentiable parts of linear layers with a low-rank adapter (LoRA, Hu et al. 2021; PEFT calls
// the factors lora_A and lora_B): y = round([x | h] [w | s B]^T + bias), h = round(x A^T), where w
// and the bias are frozen. See kernels/lora.h.
#pragma once

#include <vector>

#include "autograd/ops.h"
#include "kernels/lora.h"
#include "kernels/quantized_weight.h"

namespace cohort {

// The adapter of a linear layer, or undefined. The layer may have several modules, such as queries
// and keys: each has columns of h, and with them a block of s B, which is 0 elsewhere.
struct Lora {
  using Module = kernels::AdapterSlice;
  Variable a;  // [modules rank, K], behind which P - modules rank rows of zeros are padding
  Variable b;  // [rows of all modules, rank]
  std::vector<Module> modules;
  double scale = 1;
  // Adapters side by side, of which the first is that of `a` and `b`; the others, which are not
  // trained, are in the padding of `a` and in further columns of s B.
  int64_t slots = 1;

  bool defined() const { return a.defined(); }
  int64_t rank() const { return b.shape()[1]; }
  // P, the columns of h.
  int64_t columns() const { return defined() ? a.value().with_padding().dim(0) : 0; }
};
enum class Adapters : uint8_t { kOn, kOff };
// The adapters of a forward. Where a layer has several side by side, row t has that of
// table[rows[t]], the first one without a table; a row below 0 has none.
struct AdapterUse {
  Adapters state = Adapters::kOn;
  Tensor rows = {}, table = {};  // [T] and [R] i32
  AdapterUse(Adapters state = Adapters::kOn) : state(state) {}
  AdapterUse(Tensor rows, Tensor table) : rows(std::move(rows)), table(std::move(table)) {}
};

// The weight w [N, K] of a linear layer with the columns [N, P] of its adapter, s B, behind: a
// tensor, or a frozen one in 8 or 4 bits, of which each use makes a tensor.
struct LayerWeight {
  Variable leaf;                       // the shape alone if `quantized` is defined
  kernels::QuantizedWeight quantized;  // undefined: the leaf has the values
  Tensor adapter;                      // s B beside `quantized`, if there is an adapter

  LayerWeight() = default;
  LayerWeight(Variable leaf) : leaf(std::move(leaf)) {}
  bool is_quantized() const { return quantized.defined(); }
  // [N, K], which may be columns of a wider matrix.
  Tensor values() const;
  // [w | s B], [N, K + P].
  Tensor with_adapter() const;
  // s B [N, P]; columns of a wider matrix unless the weight is quantised.
  Tensor adapter_columns() const;
  // with_adapter(), for a GEMM of so many rows of x; undefined if quantized_linear() reads the
  // weight as it is. To be called before the tail of x is written, which must be by the kernel
  // right before the GEMM.
  Tensor for_rows(int64_t rows, bool with_bias) const;
};

// The input of a linear layer: [x | h], or x alone if there is no adapter; and h again, contiguous
// and for LoraBackward, if it is asked for.
struct LoraInputs {
  Tensor xh, h;
};
// Writes h, or zeros if adapters are off, behind x: into the padding of its rows, which norms and
// attention() make if asked to; else behind a copy of x.
LoraInputs lora_inputs(const Tensor& x, const Lora& lora, const AdapterUse& use, bool keeps_h);

// The adapter's part of a layer's backward, from dy [T, N]; nothing if `lora` is undefined. The
// gradient of the layer's input is dy w + dh A.
struct LoraBackward {
  Lora lora;
  Tensor h, sb;  // contiguous h [T, P]; s B

  bool defined() const { return lora.defined(); }
  // Writes the gradient of B and returns dh [T, P], that of h.
  Tensor output_gradients(const Tensor& dy, GradSlot db) const;
  // Writes the gradient of A; x [T, K].
  void input_gradient(const Tensor& dh, const SavedTensor& x, GradSlot da) const;
  // [P, K]
  Tensor a() const { return lora.a.value().with_padding(); }
};

// x[..., K] w[N, K]^T + bias[N] with an adapter, or with a frozen weight alone.
Variable lora_linear(const Variable& x, const LayerWeight& w, const Variable& bias,
                     const Lora& lora, const AdapterUse& use);

}  // namespace cohort
