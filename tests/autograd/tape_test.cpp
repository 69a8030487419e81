// The tape: accumulation, memory of a backward, hooks, deep chains, checkpoints.
#include <memory>

#include "autograd/ops.h"
#include "core/allocator.h"
#include "kernels/rope.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

using Inputs = std::span<const Variable>;

Variable parameter(const std::vector<double>& values) {
  return Variable::parameter(Tensor::from(values), "p");
}
std::vector<double> grad(const Variable& v) {
  return v.grad().to_vector<double>();
}
using Values = std::vector<double>;

int64_t live_bytes() {
  return allocator(Device{}).stats().live_bytes;
}

}  // namespace

TEST(Tape, QkNormIsInPlaceIfNoBackwardNeedsItsInput) {
  const Variable x = Variable::parameter(test::random_tensor({3, 5, 4}, DType::kF64, 1));
  const QkNormWeights w{Variable(test::random_tensor({4}, DType::kF64, 2)),
                        Variable(test::random_tensor({4}, DType::kF64, 3))};
  const Tensor before = x.value().clone();
  Variable own = scale(x, 1);
  const Variable taped = qk_norm(std::move(own), w, 1, 1e-5);
  const NoGradGuard no_grad;
  EXPECT_TRUE(test::bit_equal(qk_norm(x, w, 1, 1e-5).value(), taped.value()));
  EXPECT_TRUE(test::bit_equal(x.value(), before));
  Variable alone = scale(x, 1);
  const void* const memory = alone.value().raw();
  const Variable y = qk_norm(std::move(alone), w, 1, 1e-5);
  EXPECT_EQ(y.value().raw(), memory);
  EXPECT_TRUE(test::bit_equal(y.value(), taped.value()));
}

// The gradient of a term of attention does not depend on whether those of queries, keys and values
// are wanted.
TEST(Tape, TermsOfAttentionMayBeAllThatIsDifferentiated) {
  const Tensor x = test::random_tensor({7, 6, 3}, DType::kF64, 1),
               starts = Tensor::from(std::vector<int32_t>{0, 2, 7});
  std::vector<Tensor> bias_gradients, sink_gradients;
  for (const bool all : {false, true}) {
    const Variable qkv = all ? Variable::parameter(x) : Variable(x);
    const AttentionTerms terms{Variable::parameter(test::random_tensor({4, 5}, DType::kF64, 2)),
                               Variable::parameter(test::random_tensor({4}, DType::kF64, 3))};
    backward(sum(square(attention(qkv, 1, starts, {}, 0, terms))));
    bias_gradients.push_back(terms.bias.grad());
    sink_gradients.push_back(terms.sinks.grad());
  }
  for (const auto& gradients : {bias_gradients, sink_gradients}) {
    EXPECT_TRUE(test::bit_equal(gradients[0], gradients[1]));
    EXPECT_NE(gradients[0].to_vector<double>()[1], 0);
  }
}

// One node computes both forms of attention.
TEST(Tape, AttentionOfThreeInputsHasTheBitsOfAttentionOfOne) {
  const Tensor x = test::random_tensor({7, 6, 3}, DType::kF64, 1),
               weights = test::random_tensor({7, 12}, DType::kF64, 4),
               starts = Tensor::from(std::vector<int32_t>{0, 2, 7});
  const AttentionTerms terms{Variable::parameter(test::random_tensor({4, 5}, DType::kF64, 2)), {}};
  const Variable qkv = Variable::parameter(x);
  const Variable together = attention(qkv, 1, starts, {}, 0, terms);
  backward(weighted_sum(together, weights));
  const Tensor bias_gradient = terms.bias.grad().clone();
  terms.bias.zero_grad();

  const auto part = [](const Tensor& t, int64_t first, int64_t count) {
    return t.narrow(1, first, count).contiguous();
  };
  // The keys are a constant, whose gradient is not wanted.
  const Variable q = Variable::parameter(part(x, 0, 4)), k(part(x, 4, 1)),
                 v = Variable::parameter(part(x, 5, 1));
  const auto views = [](std::span<const Tensor> t) { return std::array{t[0], t[1], t[2]}; };
  const Variable apart =
      attention(std::array{q, k, v}, views, Tensor::empty({7, 12}, DType::kF64), starts, {}, terms);
  EXPECT_TRUE(test::bit_equal(apart.value(), together.value()));
  backward(weighted_sum(apart, weights));
  EXPECT_TRUE(test::bit_equal(q.grad(), part(qkv.grad(), 0, 4)));
  EXPECT_TRUE(test::bit_equal(v.grad(), part(qkv.grad(), 5, 1)));
  EXPECT_TRUE(test::bit_equal(terms.bias.grad(), bias_gradient));
}

// In place only if its argument has no other owner: values that others hold do not change.
TEST(Tape, RopeIsInPlaceIfItIsTheOnlyOwner) {
  const Tensor positions = Tensor::from(std::vector<int32_t>{3, 1});
  const Tensor table = kernels::rope_table(4, kernels::rope_frequencies(4, 100), 1, DType::kF64);
  const auto rotate = [&](Variable x) { return rope(std::move(x), positions, table, 1); };
  const Variable leaf = Variable::parameter(test::random_tensor({2, 3, 4}, DType::kF64, 1));
  const Tensor before = leaf.value().clone();
  EXPECT_NE(rotate(leaf).value().raw(), leaf.value().raw());
  EXPECT_TRUE(test::bit_equal(leaf.value(), before));

  Variable own = scale(leaf, 2);
  const void* const memory = own.value().raw();
  const Variable rotated = rotate(std::move(own));
  EXPECT_EQ(rotated.value().raw(), memory);
  EXPECT_TRUE(test::bit_equal(rotated.value(), rotate(scale(leaf, 2)).value()));
  // An op that keeps its output, such as exp(), is an owner, too.
  const Variable x = scale(leaf, 0.5);
  const Variable loss = sum(rotate(exp(x)));
  backward(loss);
  const Tensor got = leaf.grad().clone();
  leaf.zero_grad();
  const Variable kept = exp(scale(leaf, 0.5));
  backward(sum(rotate(kept)));
  EXPECT_TRUE(test::bit_equal(got, leaf.grad()));
}

// After zero_grad() the contents of a gradient do not matter: it is overwritten, or zeroed when it
// is accessed or if a backward does not reach it.
TEST(Tape, ZeroGradDiscardsTheGradient) {
  const Variable w = Variable::parameter(Tensor::from(Values{2, 3})),
                 unreached = Variable::parameter(Tensor::from(Values{5}));
  const auto discard = [&] {
    for (const Variable& v : {w, unreached}) {
      v.grad() = Tensor::full(v.shape(), NAN, DType::kF64);
      v.zero_grad();
    }
  };
  discard();
  EXPECT_EQ(w.grad().to_vector<double>(), (Values{0, 0}));
  discard();
  backward(sum(square(w)));
  EXPECT_EQ(w.grad().to_vector<double>(), (Values{4, 6}));
  EXPECT_EQ(unreached.grad().to_vector<double>(), (Values{0}));
  backward(sum(square(w)));
  EXPECT_EQ(w.grad().to_vector<double>(), (Values{8, 12}));
  discard();
  backward(sum(add(square(w), w)));  // two contributions, of which the first overwrites
  EXPECT_EQ(w.grad().to_vector<double>(), (Values{5, 7}));
}

TEST(Tape, GradientsAccumulateUntilZeroed) {
  const Variable w = parameter({1, -2, 3});
  backward(sum(square(w)));
  EXPECT_EQ(grad(w), (Values{2, -4, 6}));
  backward(sum(square(w)));
  EXPECT_EQ(grad(w), (Values{4, -8, 12}));
  w.zero_grad();
  EXPECT_EQ(grad(w), (Values{0, 0, 0}));
  backward(sum(w));
  EXPECT_EQ(grad(w), (Values{1, 1, 1}));
}

TEST(Tape, SeedWeighsTheOutput) {
  const Variable w = parameter({1, 2});
  backward(square(w), Tensor::from(Values{10, 0.5}));
  EXPECT_EQ(grad(w), (Values{20, 2}));
  EXPECT_THROW_WITH(backward(square(w)), Error, "needs a seed");
  EXPECT_THROW_WITH(backward(square(w), Tensor::from(Values{1})), Error, "seed");
}

TEST(Tape, BackwardLeavesTheSeedAlone) {
  const Variable w = parameter({1, 2});
  const Tensor seed = Tensor::from(Values{3, 4});
  const Variable x = scale(w, 1);
  backward(add(x, x), seed);  // the seed itself is passed on, and accumulated into
  EXPECT_EQ(seed.to_vector<double>(), (Values{3, 4}));
  EXPECT_EQ(grad(w), (Values{6, 8}));
}

TEST(Tape, SecondBackwardOverAFreedTapeThrows) {
  const Variable w = parameter({1, 2});
  const Variable shared = square(w);
  const Variable loss = sum(shared);
  backward(loss);
  EXPECT_THROW_WITH(backward(loss), Error, "freed");
  EXPECT_THROW_WITH(backward(sum(shared)), Error, "freed");
}

TEST(Tape, LossesOutsideTheTapeThrow) {
  EXPECT_THROW_WITH(backward(sum(Variable(Tensor::from(Values{1})))), Error,
                    "nothing in this loss requires a gradient");
  EXPECT_THROW_WITH(backward(parameter({1})), Error, "parameter itself");
  EXPECT_THROW_WITH(Variable::parameter(Tensor::zeros({2}, DType::kI32), "ids"), Error, "ids");
  EXPECT_THROW_WITH(square(parameter({1})).grad(), Error, "only a parameter");
  EXPECT_THROW_WITH(Variable(Tensor::from(Values{1})).zero_grad(), Error, "only a parameter");
}

TEST(Tape, NoGradGuardMakesConstants) {
  const Variable w = parameter({1, 2});
  {
    const NoGradGuard guard;
    EXPECT_FALSE(grad_enabled());
    { const NoGradGuard nested; }
    EXPECT_FALSE(square(w).requires_grad());
  }
  EXPECT_TRUE(grad_enabled());
  EXPECT_TRUE(square(w).requires_grad());
  EXPECT_FALSE(square(w.detach()).requires_grad());
}

TEST(Tape, UnusedParametersHaveZeroGradients) {
  const Variable used = parameter({2}), unused = parameter({5, 6});
  backward(sum(square(used)));
  EXPECT_EQ(grad(used), Values{4});
  EXPECT_EQ(grad(unused), (Values{0, 0}));
}

TEST(Tape, DiamondsSumTheirPaths) {
  const Variable w = parameter({3});
  const Variable a = square(w), b = scale(w, 5);
  backward(sum(mul(a, add(a, b))));  // w^4 + 5 w^3
  EXPECT_EQ(grad(w), Values{4 * 27 + 15 * 9});
}

TEST(Tape, GradStorageMayBeTheCallers) {
  const Variable w = parameter({1, 2});
  Tensor buffer = Tensor::zeros({4}, DType::kF64);
  w.set_grad_storage(buffer.narrow(0, 1, 2));
  backward(sum(square(w)));
  EXPECT_EQ(buffer.to_vector<double>(), (Values{0, 2, 4, 0}));
  EXPECT_THROW_WITH(w.set_grad_storage(Tensor::zeros({3}, DType::kF64)), Error, "storage");
}

TEST(Tape, BackwardFreesWhatItHasUsed) {
  const Variable w = parameter(Values(1000, 1));
  w.zero_grad();
  const int64_t before = live_bytes();
  Variable x = w;
  for (int i = 0; i < 50; ++i) x = square(x);
  const Variable loss = sum(x);
  x = {};
  EXPECT_GT(live_bytes() - before, 50 * 8000);
  allocator(Device{}).reset_peak();
  const int64_t start = live_bytes();
  backward(loss);
  // Values are freed during the backward: a few tensors are alive at a time, not fifty.
  EXPECT_LT(allocator(Device{}).stats().peak_bytes - start, 5 * 8192);
  EXPECT_LT(live_bytes() - before, 5 * 8192);
}

// A head whose rows of x come from its own weights, so that these have two gradients.
class HeadLossTest : public ::testing::Test {
 protected:
  HeadLoss loss(const Variable& hidden, const Variable& w) const {
    return cross_entropy(hidden, w, targets_, weights_);
  }

  Tensor ids_ = Tensor::from(std::vector<int32_t>{4, 0, 2, 4});
  Tensor targets_ = Tensor::from(std::vector<int32_t>{1, 3, 3, 0});
  Tensor weights_ = test::random_tensor({4}, DType::kF64, 5);
  Variable w_ = Variable::parameter(test::random_tensor({5, 3}, DType::kF64, 6), "w");
};

TEST_F(HeadLossTest, EqualThoseOfTheTape) {
  const Variable expected = Variable::parameter(w_.value().clone(), "expected");
  int fired = 0;
  w_.on_gradient([&] { ++fired; });
  for (int micro_batch = 1; micro_batch <= 3; ++micro_batch) {
    const Variable on_tape = scale(
        weighted_sum(token_log_probs(square(embedding(expected, ids_)), expected, targets_).logprob,
                     weights_),
        -1);
    backward(on_tape);
    const HeadLoss made = loss(square(embedding(w_, ids_)), w_);
    EXPECT_TRUE(test::bit_equal(made.loss, on_tape.value()));
    EXPECT_EQ(fired, micro_batch - 1);
    backward(made);
    EXPECT_LT(test::relative_error(w_.grad(), expected.grad()), 1e-15);
    EXPECT_EQ(fired, micro_batch);
  }
}

// The hooks of a head that the tape of the hidden states does not reach are called first.
TEST_F(HeadLossTest, OfAHeadOfItsOwnAreFinalBeforeTheBackward) {
  const Variable table = Variable::parameter(test::random_tensor({5, 3}, DType::kF64, 7));
  std::vector<std::string> order;
  w_.on_gradient([&] { order.push_back("head"); });
  table.on_gradient([&] { order.push_back("table"); });
  const HeadLoss made = loss(embedding(table, ids_), w_);
  const Tensor before = w_.grad().clone();
  EXPECT_NE(test::norm(before), 0);
  backward(made);
  EXPECT_EQ(order, (std::vector<std::string>{"head", "table"}));
  EXPECT_TRUE(test::bit_equal(w_.grad(), before));
}

TEST_F(HeadLossTest, AreNotComputedWhereTheyAreDisabledOrNotNeeded) {
  {
    NoGradGuard guard;
    EXPECT_FALSE(loss(square(embedding(w_, ids_)), w_).dhidden.defined());
  }
  EXPECT_EQ(test::norm(w_.grad()), 0);
  const Variable x = Variable::parameter(test::random_tensor({4, 3}, DType::kF64, 8));
  const HeadLoss made = loss(x, Variable(w_.value()));
  EXPECT_TRUE(made.dhidden.defined());
  EXPECT_EQ(test::norm(w_.grad()), 0);
  EXPECT_THROW_WITH(loss(x, scale(w_, 2)), Error, "only a parameter has a gradient");
}

TEST(Tape, DeepChainsNeedNoStack) {
  constexpr int kDepth = 200000;
  const Variable w = parameter({1});
  {
    Variable x = w;
    for (int i = 0; i < kDepth; ++i) x = add(x, w);
    backward(x);
    EXPECT_EQ(grad(w), Values{kDepth + 1.0});
  }
  // Destruction without a backward, straight and with shared nodes.
  Variable x = w, y = w;
  for (int i = 0; i < kDepth; ++i) {
    x = neg(x);
    y = add(y, y);
  }
  x = {};
  y = {};
}

TEST(Hooks, FireOnceWithTheFinalGradient) {
  const Variable w = parameter({3}), late = parameter({2});
  std::vector<double> seen;
  bool late_fired = false;
  w.on_gradient([&] {
    seen.push_back(grad(w)[0]);
    EXPECT_FALSE(late_fired);  // `late` enters first, so its gradient is final last
  });
  late.on_gradient([&] { late_fired = true; });
  const Variable h = square(late);
  const Variable a = square(w);
  backward(sum(add(mul(a, w), add(mul(w, w), h))));  // w^3 + w^2 + late^2
  EXPECT_EQ(seen, Values{27 + 6});
  EXPECT_TRUE(late_fired);
  late_fired = false;
  backward(sum(w));
  EXPECT_EQ(seen, (Values{33, 34}));
  EXPECT_FALSE(late_fired);  // not part of this backward
}

TEST(Hooks, FireForAParameterThatNoGradientReached) {
  // An op may skip an input; the hook of the parameter must fire nevertheless.
  const Variable w = parameter({3}), used = parameter({4});
  int fired = 0;
  w.on_gradient([&] { ++fired; });
  const Variable skipped = square(w);
  const Variable y = make_node("first", used.value().clone(), {used, skipped},
                               [](const Tensor& dy, Gradients& g) { g.pass(0, dy); });
  backward(sum(y));
  EXPECT_EQ(fired, 1);
  EXPECT_EQ(grad(w), Values{0});
}

TEST(Hooks, TiedParametersFireOnceThroughACheckpoint) {
  const Variable tied = parameter({2}), inside = parameter({5});
  std::vector<double> tied_seen, inside_seen;
  tied.on_gradient([&] { tied_seen.push_back(grad(tied)[0]); });
  inside.on_gradient([&] { inside_seen.push_back(grad(inside)[0]); });
  const Variable x = square(tied);  // 4: used before, in and after the checkpoint
  const auto fn = [=](Inputs in) { return mul(mul(in[0], tied), mul(inside, inside)); };
  const std::vector<Variable> parameters = {tied, inside};
  const Variable y = checkpoint(fn, {&x, 1}, parameters);
  backward(sum(add(mul(y, tied), mul(inside, tied))));  // t^4 i^2 + i t
  EXPECT_EQ(grad(tied), Values{4 * 8 * 25 + 5});
  EXPECT_EQ(grad(inside), Values{2 * 16 * 5 + 2});
  EXPECT_EQ(tied_seen, grad(tied));
  EXPECT_EQ(inside_seen, grad(inside));
}

TEST(MakeNode, OneVariableAsSeveralInputsGetsASlotForEach) {
  // The op writes its slots in any order and overwrites those of kOverwrite.
  const auto multiply = [](const Variable& a, const Variable& b) {
    Tensor y = Tensor::empty_like(a.value());
    kernels::mul_forward({.y = y, .a = a.value(), .b = b.value()});
    return make_node("multiply", y, {a, b},
                     [a = a.value(), b = b.value()](const Tensor& dy, Gradients& g) {
                       GradSlot da = g.slot(0), db = g.slot(1);
                       kernels::mul_backward({.da = da, .db = db, .dy = dy, .a = a, .b = b});
                     });
  };
  const Variable w = parameter({3, 4});
  const Variable x = scale(w, 1);
  backward(sum(multiply(x, x)));
  EXPECT_EQ(grad(w), (Values{6, 8}));
  backward(sum(multiply(w, w)));
  EXPECT_EQ(grad(w), (Values{12, 16}));
}

namespace {

// A chain of `blocks` residual MLP blocks, each checkpointed or not; returns output and gradients.
std::vector<Tensor> run_blocks(bool checkpointed, int blocks, DType dtype, int64_t* peak) {
  const int64_t tokens = 64, c = 16, hidden = 48;
  const Variable input = Variable::parameter(test::random_tensor({tokens, c}, dtype, 1));
  std::vector<std::vector<Variable>> weights;
  for (int i = 0; i < blocks; ++i) {
    const auto w = [&](const Shape& shape, uint64_t k) {
      return Variable::parameter(
          test::random_tensor(shape, dtype, 10 * static_cast<uint64_t>(i) + k, 0.3));
    };
    weights.push_back({w({c}, 2), w({2 * hidden, c}, 3), w({c, hidden}, 5)});
    for (const Variable& v : weights.back()) v.zero_grad();
  }
  const int64_t before = live_bytes();
  allocator(Device{}).reset_peak();
  Variable x = input;
  for (const auto& w : weights) {
    const auto block = [w](Inputs in) {
      const Variable h = rms_norm(in[0], w[0], {.eps = 1e-5});
      return add(in[0], linear(swiglu(linear(h, w[1])), w[2]));
    };
    x = checkpointed ? checkpoint(block, {&x, 1}, w) : block({&x, 1});
  }
  std::vector<Tensor> out = {x.value()};
  const Variable loss = sum(square(x));
  x = {};
  backward(loss);
  *peak = allocator(Device{}).stats().peak_bytes - before;
  out.push_back(input.grad());
  for (const auto& w : weights)
    for (const Variable& v : w) out.push_back(v.grad());
  return out;
}

}  // namespace

TEST(Checkpoint, GivesTheSameBitsWithLessMemory) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    int64_t plain_peak = 0, checkpointed_peak = 0;
    const auto plain = run_blocks(false, 6, dtype, &plain_peak);
    const auto checkpointed = run_blocks(true, 6, dtype, &checkpointed_peak);
    ASSERT_EQ(plain.size(), checkpointed.size());
    for (size_t i = 0; i < plain.size(); ++i)
      EXPECT_TRUE(test::bit_equal(plain[i], checkpointed[i])) << i;
    EXPECT_LT(checkpointed_peak, plain_peak / 2);
  }
}

TEST(Checkpoint, RefusesAnIntermediateValueAsParameter) {
  const Variable w = parameter({3});
  const Variable x = square(w);
  EXPECT_THROW_WITH(checkpoint([x](Inputs in) { return mul(in[0], x); }, {&w, 1}, {&x, 1}), Error,
                    "hint: make it an input");
}

TEST(Checkpoint, WithoutGradientsItIsTheFunction) {
  const Variable w = parameter({3});
  int calls = 0;
  const auto fn = [&calls](Inputs in) {
    ++calls;
    return square(in[0]);
  };
  const NoGradGuard guard;
  EXPECT_FALSE(checkpoint(fn, {&w, 1}, {}).requires_grad());
  EXPECT_EQ(calls, 1);
}

TEST(Checkpoint, RunsItsFunctionOncePerDirection) {
  const Variable w = parameter({3}), constant(Tensor::from(Values{2}));
  int calls = 0;
  const auto fn = [&calls](Inputs in) {
    ++calls;
    return mul(square(in[0]), in[1]);
  };
  const std::vector<Variable> inputs = {w, constant};
  const Variable y = checkpoint(fn, inputs, {});
  EXPECT_EQ(calls, 1);
  {
    const NoGradGuard guard;  // around the backward: the recomputation still needs its tape
    backward(y);
  }
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(grad(w), Values{12});
}

}  // namespace cohort
