// The layout of a model's parameters: units, flat indices, roles, and the storage of gradients.
#include "nn/parameter_set.h"

#include <map>

#include "core/allocator.h"
#include "tests/kernels/kernel_test.h"
#include "tests/nn/models.h"

namespace cohort {
namespace {

constexpr int64_t kUnit = ParameterSet::kUnitAlignment;

ParameterSet empty_set(DType dtype = DType::kF32) {
  return {dtype, {}, std::nullopt};
}

// By hand: leaves begin at multiples of 64 elements, units at multiples of 65,536.
TEST(ParameterSet, HasOneLayoutOfPaddedUnits) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    ParameterSet set = empty_set(dtype);
    set.add({"table", {65, 3}, ParameterUse::kLookup});
    set.begin_unit();
    set.add({"w", {kUnit}, ParameterUse::kVector});
    set.add({"b", {1}});
    set.begin_unit();
    set.add({"norm", {70}});
    set.add({"head", {2, 2}, ParameterUse::kMatmul});
    std::vector<std::pair<size_t, int64_t>> addresses;
    for (const NamedParameter& p : set) addresses.emplace_back(p.unit, p.flat_index);
    EXPECT_EQ(addresses,
              (std::vector<std::pair<size_t, int64_t>>{
                  {0, 0}, {1, kUnit}, {1, 2 * kUnit}, {2, 3 * kUnit}, {2, 3 * kUnit + 128}}));
    std::vector<int64_t> ends;
    for (const ParameterUnit& unit : set.units()) ends.push_back(unit.end);
    EXPECT_EQ(ends, (std::vector<int64_t>{kUnit, 3 * kUnit, 4 * kUnit}));
  }
}

TEST(ParameterSet, UnitsOfAModelAreItsTablesItsBlocksAndItsEnd) {
  for (const auto& [name, config] : test::model_cases()) {
    SCOPED_TRACE(name);
    const Transformer model(config, DType::kF32, 1);
    const ParameterSet& set = model.parameters();
    ASSERT_EQ(set.units().size(), static_cast<size_t>(config.num_layers) + 2);
    for (const NamedParameter& p : set) {
      const bool table = p.name.starts_with("model.embed") || p.name.starts_with("model.relative");
      size_t unit = table ? 0 : set.units().size() - 1;
      if (const std::string layers = "model.layers."; p.name.starts_with(layers))
        unit = std::stoul(p.name.substr(layers.size())) + 1;
      EXPECT_EQ(p.unit, unit) << p.name;
    }
    int64_t end = 0;
    size_t leaf = 0;
    for (const ParameterUnit& unit : set.units()) {
      EXPECT_EQ(unit.begin, end);
      EXPECT_GT(unit.end, unit.begin);
      EXPECT_EQ(unit.end % kUnit, 0);
      EXPECT_EQ(unit.first_leaf, leaf);
      end = unit.end;
      leaf = unit.end_leaf;
    }
    EXPECT_EQ(leaf, set.trained().size());
    // No flat index belongs to two parameters, and the rows of a leaf are neighbours.
    std::map<int64_t, int64_t> ranges;
    for (const NamedParameter& p : set) {
      ranges[p.flat_index] = p.flat_index + p.value.numel();
      EXPECT_GE(p.flat_index, set.units()[p.unit].begin) << p.name;
      EXPECT_LE(p.flat_index + p.value.numel(), set.units()[p.unit].end) << p.name;
      const int64_t row = p.value.numel() / p.value.dim(0);
      EXPECT_EQ((p.flat_index - p.first_row * row) % ParameterSet::kLeafAlignment, 0) << p.name;
    }
    EXPECT_EQ(ranges.size(), set.size());
    int64_t free = 0;
    for (const auto& [begin, behind] : ranges) {
      EXPECT_GE(begin, free);
      free = behind;
    }
  }
}

// The gradients of a unit are one tensor without the padding of units, and exist until they are
// freed.
TEST(ParameterSet, GradientsOfAUnitLieInOneTensor) {
  ParameterSet set = empty_set(DType::kBF16);
  const Variable a = set.add({"a", {65}}), b = set.add({"b", {2}});
  set.begin_unit();
  set.add({"frozen", {1000}, ParameterUse::kVector, 0, ParameterRole::kFrozen});
  set.begin_unit();
  const Variable c = set.add({"c", {3, 5}, ParameterUse::kMatmul});
  const int64_t before = allocator(Device{}).stats().live_bytes;
  std::vector<Tensor> units;
  for (size_t unit = 0; unit < 3; ++unit) units.push_back(set.allocate_gradients(unit));
  EXPECT_EQ(units[0].shape(), Shape({192}));
  EXPECT_EQ(units[1].numel(), 0);  // nothing is trained in the second unit
  EXPECT_EQ(units[2].shape(), Shape({64}));
  EXPECT_EQ(units[0].dtype(), DType::kF32);
  EXPECT_EQ(set[1].gradient_begin, 128);
  EXPECT_EQ(b.grad().raw(), units[0].narrow(0, 128, 1).raw());
  EXPECT_EQ(c.grad().shape(), c.shape());
  EXPECT_EQ(a.grad().to_vector<double>(), std::vector<double>(65, 0));  // whatever the memory held
  units[0].fill_(7);
  EXPECT_EQ(a.grad().to_vector<double>(), std::vector<double>(65, 7));
  units.clear();
  set.free_gradients();
  EXPECT_EQ(allocator(Device{}).stats().live_bytes, before);
}

// Padding rows are zero, and only memory has them.
TEST(ParameterSet, PaddingRowsBelongToNoParameter) {
  ParameterSet set(DType::kF32, {}, 1);
  const Variable head = set.add(
      {.name = "head", .shape = {61, 3}, .use = ParameterUse::kMatmul, .init = 1, .leaf_rows = 64});
  set.add({"b", {2}});
  EXPECT_EQ(head.shape(), Shape({61, 3}));
  EXPECT_EQ(head.value().with_padding().shape(), Shape({64, 3}));
  EXPECT_TRUE(kernels::test::padding_is(head.value(), 0, 0));
  EXPECT_EQ(set[0].value.shape(), Shape({61, 3}));
  EXPECT_EQ(set[1].flat_index, 192);  // 61 x 3 elements, rounded up to 64
  // Same initial values as without padding.
  ParameterSet plain(DType::kF32, {}, 1);
  plain.add({"head", {61, 3}, ParameterUse::kMatmul, 1});
  EXPECT_TRUE(test::bit_equal(set[0].value, plain[0].value));
  // Also a gradient outside of the flat storage is padded.
  EXPECT_EQ(head.grad().shape(), Shape({61, 3}));
  EXPECT_TRUE(kernels::test::padding_is(head.grad(), 0, 0));
  EXPECT_EQ(head.grad().with_padding().dim(0), 64);
  EXPECT_EQ(set.allocate_gradients(0).numel(), 256);
  EXPECT_EQ(set[1].gradient_begin, 192);
  EXPECT_TRUE(kernels::test::padding_is(head.grad(), 0, 0));
  EXPECT_EQ(head.grad().shape(), Shape({61, 3}));
  EXPECT_EQ(head.grad().with_padding().dim(0), 64);
  EXPECT_EQ(set[0].grad().shape(), Shape({61, 3}));
}

TEST(ParameterSet, FrozenParametersHaveNoGradient) {
  ParameterSet set = empty_set();
  const Variable w = set.add({"w", {2, 2}, ParameterUse::kMatmul, 0, ParameterRole::kFrozen});
  const Variable b = set.add({"b", {2}});
  EXPECT_FALSE(set[0].trained());
  EXPECT_TRUE(set[1].trained());
  ASSERT_EQ(set.trained().size(), 1u);
  EXPECT_EQ(set.units()[0].end_leaf, 1u);
  EXPECT_EQ(set.trained()[0].value().raw(), b.value().raw());
  const Variable x = Variable::parameter(Tensor::full({1, 2}, 1, DType::kF32));
  Tensor(w.value()).fill_(2);
  backward(sum(linear(x, w, b)));
  EXPECT_EQ(x.grad().to_vector<double>(), (std::vector<double>{4, 4}));
  EXPECT_EQ(b.grad().to_vector<double>(), (std::vector<double>{1, 1}));
}

}  // namespace
}  // namespace cohort
