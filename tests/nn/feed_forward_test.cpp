// mlp() equals its three ops, with and without recomputation, for any subset of gradients.
#include "nn/feed_forward.h"

#include <utility>

#include "core/allocator.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

using kernels::Activation;

struct Op {
  const char* name;
  Activation activation;
  Variable (*fn)(const Variable&);
};
const Op kOps[] = {{"swiglu", Activation::kSwiGlu, swiglu},
                   {"gelu", Activation::kGelu, gelu},
                   {"gelu_tanh", Activation::kGeluTanh, gelu_tanh},
                   {"geglu", Activation::kGeGlu, geglu},
                   {"geglu_tanh", Activation::kGeGluTanh, geglu_tanh}};

constexpr int64_t kRows = 37, kChannels = 6, kHidden = 11;

struct Leaves {
  Variable x;
  Linear up, down;
  std::vector<Variable> all() const {
    return {x, up.weight.leaf, up.bias, down.weight.leaf, down.bias};
  }
};

// Bit i of `wanted`: leaf i is differentiated. Gradients start from values other than zero, so that
// the backward must accumulate.
Leaves make_leaves(const Op& op, DType dtype, unsigned wanted, bool biases) {
  const int64_t up = is_gated(op.activation) ? 2 * kHidden : kHidden;
  uint64_t i = 0;
  const auto leaf = [&](const Shape& shape) {
    const Tensor value = test::random_tensor(shape, dtype, 10 + i);
    const Variable v = wanted >> i & 1 ? Variable::parameter(value) : Variable(value);
    if (v.requires_grad()) v.grad() = test::random_tensor(shape, dtype, 20 + i);
    ++i;
    return v;
  };
  Leaves out;
  out.x = leaf({kRows, kChannels});
  out.up.weight = leaf({up, kChannels});
  out.up.bias = leaf({up});
  out.down.weight = leaf({kChannels, kHidden});
  out.down.bias = leaf({kChannels});
  if (!biases) out.up.bias = out.down.bias = {};
  return out;
}

struct Outcome {
  Tensor y;
  std::vector<Tensor> gradients;  // undefined for a constant
};

Outcome run(const Leaves& leaves, const std::function<Variable(const Leaves&)>& fn) {
  const Variable y = fn(leaves);
  if (y.requires_grad()) backward(y, test::random_tensor(y.shape(), y.value().dtype(), 2));
  Outcome out{y.value(), {}};
  for (const Variable& leaf : leaves.all())
    out.gradients.push_back(leaf.requires_grad() ? leaf.grad() : Tensor());
  return out;
}

int64_t live_bytes() {
  return allocator(Device{}).stats().live_bytes;
}

TEST(Mlp, HasTheBitsOfItsThreeOps) {
  for (const Op& op : kOps)
    for (const DType dtype : {DType::kF32, DType::kF64})
      for (const bool biases : {true, false})
        for (unsigned wanted = 0; wanted < 32; ++wanted) {
          const Outcome expected =
              run(make_leaves(op, dtype, wanted, biases),
                  [&](const Leaves& in) { return in.down(op.fn(in.up(in.x))); });
          for (const bool recompute : {false, true}) {
            SCOPED_TRACE(str(op.name, " in ", dtype_name(dtype), ", biases ", biases, ", wanted ",
                             wanted, ", recompute ", recompute));
            const Outcome got = run(make_leaves(op, dtype, wanted, biases), [&](const Leaves& in) {
              return mlp(in.x, in.up, in.down, {op.activation, recompute});
            });
            ASSERT_TRUE(test::bit_equal(got.y, expected.y));
            for (size_t i = 0; i < expected.gradients.size(); ++i) {
              const Tensor &a = got.gradients[i], &b = expected.gradients[i];
              ASSERT_EQ(a.defined(), b.defined()) << i;
              ASSERT_TRUE(!a.defined() || test::bit_equal(a, b)) << i;
            }
          }
        }
}

// The gradient of an input that is not a leaf is overwritten; its memory holds garbage before.
TEST(Mlp, OverwritesTheGradientOfAnIntermediateInput) {
  for (const Op& op : kOps) {
    const auto input_gradient = [&](const std::function<Variable(const Leaves&)>& fn) {
      Leaves leaves = make_leaves(op, DType::kF64, 31, true);
      const Variable x = std::exchange(leaves.x, scale(leaves.x, 1));
      { const Tensor garbage = Tensor::full({1 << 14}, 1e6, DType::kF64); }
      const Variable y = fn(leaves);
      backward(y, test::random_tensor(y.shape(), DType::kF64, 2));
      return x.grad();
    };
    const Tensor expected =
        input_gradient([&](const Leaves& in) { return in.down(op.fn(in.up(in.x))); });
    for (const bool recompute : {false, true})
      EXPECT_TRUE(test::bit_equal(input_gradient([&](const Leaves& in) {
                                    return mlp(in.x, in.up, in.down, {op.activation, recompute});
                                  }),
                                  expected))
          << op.name;
  }
}

TEST(Mlp, KeepsTheActivationsOutputUnlessItIsRecomputed) {
  for (const Op& op : kOps) {
    const Leaves leaves = make_leaves(op, DType::kF64, 31, true);
    const auto kept = [&](bool recompute) {
      const int64_t before = live_bytes();
      const Variable y = mlp(leaves.x, leaves.up, leaves.down, {op.activation, recompute});
      return live_bytes() - before;
    };
    const auto bytes = [](int64_t columns) {
      return static_cast<int64_t>(
          allocation_size(static_cast<size_t>(kRows * columns) * sizeof(double), Device{}));
    };
    const int64_t up = is_gated(op.activation) ? 2 * kHidden : kHidden;
    EXPECT_EQ(kept(true), bytes(kChannels) + bytes(up)) << op.name;
    EXPECT_EQ(kept(false), bytes(kChannels) + bytes(up) + bytes(kHidden)) << op.name;
    const NoGradGuard no_grad;
    EXPECT_EQ(kept(false), bytes(kChannels)) << op.name;
  }
}

// In addition to the values that the forward kept, a backward has the gradients of the activation's
// output and of its input; the output, if it was kept, is freed before the second is allocated.
TEST(Mlp, ItsBackwardFreesWhatItHasUsed) {
  for (const Op& op : kOps)
    for (const bool recompute : {false, true}) {
      const Leaves leaves = make_leaves(op, DType::kF64, 31, true);
      const auto bytes = [](int64_t columns) {
        return static_cast<int64_t>(
            allocation_size(static_cast<size_t>(kRows * columns) * sizeof(double), Device{}));
      };
      const int64_t up = is_gated(op.activation) ? 2 * kHidden : kHidden;
      const Variable y = mlp(leaves.x, leaves.up, leaves.down, {op.activation, recompute});
      const Tensor seed = test::random_tensor(y.shape(), DType::kF64, 2);
      const int64_t before = live_bytes();
      allocator(Device{}).reset_peak();
      backward(y, seed);
      const int64_t peak = allocator(Device{}).stats().peak_bytes - before;
      // bytes(kChannels) is the copy of the seed.
      const int64_t freed = recompute ? 0 : bytes(kHidden);
      EXPECT_LE(peak, bytes(kChannels) + bytes(kHidden) + bytes(up) - freed) << op.name;
    }
}

}  // namespace
}  // namespace cohort
