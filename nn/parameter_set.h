// A model's parameters: named tensors with a use and a role, and their one layout. The modules add
// their parameters in a fixed order, which numbers the RNG streams of initial values. Learner,
// optimizers, gradient norm, memory estimate, checkpoints and checksums walk the set.
//
// Each element has a flat index. The units of a model (its tables; each block; the end: the last
// norm, and a head of its own) lie one after the other in one index space, each padded to a
// multiple of kUnitAlignment elements, so that it can be cut into equal slices for up to 1,024
// ranks. The leaves of a unit begin at multiples of kLeafAlignment. The layout follows from the
// configuration alone. The index is an address, of random numbers for instance: no memory is
// padded to units.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "autograd/variable.h"
#include "kernels/quantized_weight.h"

namespace cohort {

// The purpose of rng_stream() for initial values.
inline constexpr uint64_t kInitPurpose = 1;

// Use of a parameter in the forward: in a matmul with every token, as a table of rows, or
// elementwise. It is also its group for an optimizer: only vectors have no weight decay.
enum class ParameterUse : uint8_t { kMatmul, kLookup, kVector };
// Frozen parameters have no gradient, and no optimizer moves them. Adapters (autograd/lora.h) are
// trained while all others of their set are frozen.
enum class ParameterRole : uint8_t { kTrained, kFrozen, kAdapter };

// Initial values of a vector other than its constant: U(-init, init); log x, x from U(0, init), at
// least 1e-4; or x with softplus(x) = dt from [0.001, 0.1], uniform in log dt (Gu and Dao 2023).
enum class InitialValues : uint8_t { kOfUse, kUniform, kLogUniform, kTimeStep };

enum class ParameterDType : uint8_t { kOfSet, kStatistic };

struct ParameterSpec {
  std::string name;  // as in Hugging Face's Llama if it exists: model.layers.0.mlp.up_proj.weight
  Shape shape;
  ParameterUse use = ParameterUse::kVector;
  // Initial value: the constant of a vector, the bound of an adapter's uniform distribution, else
  // the standard deviation of N(0, .).
  double init = 0;
  ParameterRole role = ParameterRole::kTrained;
  InitialValues values = InitialValues::kOfUse;
  // Rows in memory if there are more than in `shape`. Those are padding (Tensor::with_padding()):
  // zeros with a gradient of zero that no parameter, count, flat index or file includes.
  int64_t leaf_rows = 0;
  // A frozen matrix in 8 or 4 bits has no tensor, but the shape of one.
  kernels::WeightFormat format = kernels::WeightFormat::kModel;
  // Columns behind each row of a frozen matrix, which are padding as well: its adapter's s B.
  int64_t padding = 0;
  // kStatistic: accumulate_dtype() of the set's; in files of 16-bit weights it is F32.
  ParameterDType dtype = ParameterDType::kOfSet;
};

// A parameter as named rows of a leaf: the parameters of one matmul are rows of one tensor, such as
// queries, keys and values.
struct NamedParameter {
  std::string name;
  Tensor value;                        // shares the leaf's storage
  kernels::QuantizedWeight quantized;  // likewise; `value` has then no elements
  kernels::QuantizedWeight quantized_leaf;
  Variable leaf;  // a constant if it is frozen
  int64_t first_row = 0;
  ParameterUse use = ParameterUse::kVector;
  ParameterRole role = ParameterRole::kTrained;
  size_t unit = 0;
  int64_t flat_index = 0;      // its first element
  int64_t gradient_begin = 0;  // that of its gradient among its unit's, if it is trained
  ParameterDType dtype = ParameterDType::kOfSet;

  bool trained() const { return leaf.requires_grad(); }
  // Shares the storage of the leaf's gradient. Not for frozen parameters.
  Tensor grad() const { return leaf.grad().narrow(0, first_row, value.dim(0)); }
};

// A tensor that holds parameters as its rows.
struct ParameterLeaf {
  Variable variable;
  kernels::QuantizedWeight quantized;
  ParameterUse use = ParameterUse::kVector;
  double init = 0;
  ParameterRole role = ParameterRole::kTrained;
  int64_t flat_index = 0;
  InitialValues values = InitialValues::kOfUse;
  ParameterDType dtype = ParameterDType::kOfSet;
  int64_t gradient_begin = 0;
};

// Flat indices [begin, end), and trained leaves [first_leaf, end_leaf), whose gradients have
// `gradients` elements together: each begins at a multiple of kLeafAlignment elements, and ends
// with its padding.
struct ParameterUnit {
  int64_t begin = 0, end = 0;
  size_t first_leaf = 0, end_leaf = 0;
  int64_t gradients = 0;
};

class ParameterSet {
 public:
  static constexpr int64_t kLeafAlignment = 64, kUnitAlignment = 64 * 1024;  // elements

  // Parameters get the same initial values on every device, rounded to `dtype`. Without a seed
  // matrices and tables are left uninitialised. With an `adapter_seed` only adapters are trained,
  // and have initial values from it; the others' do not depend on that. `base_format`: of linear
  // layers.
  ParameterSet(DType dtype, Device device, std::optional<uint64_t> seed,
               std::optional<uint64_t> adapter_seed = {},
               kernels::WeightFormat base_format = kernels::WeightFormat::kModel)
      : dtype_(dtype),
        device_(device),
        seed_(seed),
        adapter_seed_(adapter_seed),
        base_format_(base_format),
        units_(1) {}

  // The leaves added from now on belong to the next unit. The first one begins by itself.
  void begin_unit();
  // Adds a parameter that is a leaf.
  Variable add(const ParameterSpec& spec);
  // Adds a leaf whose rows are parameters, each to be added by add_rows() before the next unit;
  // spec.name is for messages only.
  ParameterLeaf add_leaf(const ParameterSpec& spec);
  // Adds rows [first_row, first_row + rows) of a leaf as a parameter.
  void add_rows(const ParameterLeaf& leaf, const std::string& name, int64_t first_row,
                int64_t rows);

  // The parameters, in the order in which they were added.
  auto begin() const { return parameters_.begin(); }
  auto end() const { return parameters_.end(); }
  size_t size() const { return parameters_.size(); }
  const NamedParameter& operator[](size_t i) const { return parameters_[i]; }
  const NamedParameter& back() const { return parameters_.back(); }

  // The gradients of the trained parameters.
  std::vector<Tensor> gradients() const;

  const std::vector<ParameterUnit>& units() const { return units_; }
  // The leaves that are trained, in order.
  const std::vector<Variable>& trained() const { return trained_; }

  // Allocates the gradients of a unit's trained leaves, which count as zeros: see
  // Variable::zero_grad(). They are in the tensor that is returned, [slices * slice_size()] in
  // accumulate_dtype(), with zeros behind the last one.
  Tensor allocate_gradients(size_t unit, int64_t slices = 1) const;
  // allocate_gradients(), in memory that it has returned earlier.
  void set_gradients(size_t unit, const Tensor& all) const;
  // Elements of a unit's gradients in each of `slices` equal slices, a multiple of kLeafAlignment.
  int64_t slice_size(size_t unit, int64_t slices) const;
  // The gradients of the unit's leaves, or of all, no longer exist; grad() of a leaf would allocate
  // new ones.
  void free_gradients(size_t unit) const;
  void free_gradients() const;

  kernels::WeightFormat base_format() const { return base_format_; }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }

 private:
  DType dtype_;
  Device device_;
  std::optional<uint64_t> seed_, adapter_seed_;
  kernels::WeightFormat base_format_;
  std::vector<NamedParameter> parameters_;
  uint64_t adapters_ = 0;  // among the parameters
  std::vector<Variable> trained_;
  std::vector<ParameterUnit> units_;
  int64_t end_ = 0;  // flat index behind the last leaf
};

}  // namespace cohort
