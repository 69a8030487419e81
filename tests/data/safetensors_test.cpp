// Round trips per dtype, a file written elsewhere, and damage of every kind.
#include "data/safetensors.h"

#include <cfloat>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "core/rng.h"
#include "tests/support/tensor_files.h"
#include "tests/support/test_util.h"
#include "text/json.h"

namespace cohort {
namespace {

using test::bit_equal;

class Safetensors : public testing::Test {
 protected:
  std::string path() const { return dir_.path("x.safetensors"); }

  // Writes a file from a given header and data.
  void write(const std::string& header, const std::string& data) {
    const uint64_t length = header.size();
    std::string text(reinterpret_cast<const char*>(&length), sizeof length);
    test::write_file(path(), text + header + data);
  }
  void expect_refused(const std::string& header, const std::string& data, const std::string& text) {
    write(header, data);
    EXPECT_THROW_WITH(SafetensorsFile{path()}, InputError, text);
    EXPECT_THROW_WITH(SafetensorsFile{path()}, InputError, path() + ": ");
  }
  test::TempDir dir_;
};

TEST_F(Safetensors, RoundTripsEveryDtypeAndShape) {
  NamedTensors tensors;
  for (const DType dtype :
       {DType::kU8, DType::kBF16, DType::kI32, DType::kF32, DType::kI64, DType::kF64}) {
    const std::string name = dtype_name(dtype);
    tensors.emplace_back(name + ".matrix",
                         test::random_tensor({3, 5}, DType::kF64, 1, 50).to(DType::kI32).to(dtype));
    tensors.emplace_back(name + ".scalar", Tensor::full({}, 7, dtype));
    tensors.emplace_back(name + ".empty", Tensor::zeros({4, 0, 2}, dtype));
    tensors.emplace_back(name + ".deep", Tensor::full({1, 2, 1, 2, 1, 3}, 3, dtype));
  }
  write_safetensors(path(), tensors);
  const SafetensorsFile file(path());
  ASSERT_EQ(file.names().size(), tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& [name, tensor] = tensors[i];
    EXPECT_EQ(file.names()[i], name);
    EXPECT_EQ(file.shape(name), tensor.shape());
    EXPECT_EQ(file.dtype(name), tensor.dtype());
    EXPECT_TRUE(bit_equal(file.read(name), tensor)) << name;
  }
}

TensorSource source(const std::string& name, const std::string& type, const Tensor& tensor) {
  return {name, tensor.shape(), type, [tensor] { return tensor; }};
}

// Every half, and all midpoints between neighbours, which round to the even one.
TEST_F(Safetensors, HalvesAreRoundedToNearestEven) {
  std::string bits(2 * 0x7c00, '\0');
  for (uint16_t i = 0; i < 0x7c00; ++i) std::memcpy(&bits[2 * i], &i, 2);
  write(R"({"h":{"dtype":"F16","shape":[31744],"data_offsets":[0,63488]}})", bits);
  const std::vector<double> halves = SafetensorsFile(path()).read("h").to_vector<double>();
  std::vector<double> values, expected;
  for (size_t i = 0; i < halves.size(); ++i) {
    for (const double sign : {1.0, -1.0}) {
      values.push_back(sign * halves[i]);
      expected.push_back(sign * halves[i]);
      if (i == 0) continue;
      const double middle = sign * (halves[i - 1] + halves[i]) / 2;
      values.insert(values.end(), {middle, std::nextafter(middle, 0), middle * (1 + 1e-7)});
      const double low = sign * halves[i - 1], high = sign * halves[i];
      expected.insert(expected.end(), {i % 2 == 0 ? high : low, low, high});
    }
  }
  values.push_back(NAN);
  const auto read_back = [&](DType dtype) {
    write_sharded(dir_.path(""), "x", {source("h", "F16", Tensor::from(values).to(dtype))});
    const SafetensorsFile file(path());
    EXPECT_STREQ(file.stored_dtype("h"), "F16");
    return file.read("h").to_vector<double>();
  };
  const std::vector<double> read = read_back(DType::kF64);
  EXPECT_TRUE(std::isnan(read.back()));
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(read[i], expected[i]) << values[i];
    ASSERT_EQ(std::signbit(read[i]), std::signbit(expected[i])) << values[i];
  }
  values = {1.0f + 0x1p-11f, 1.0f + 0x1p-10f + 0x1p-11f, 65504, 1e-9f};
  EXPECT_EQ(read_back(DType::kF32), (std::vector<double>{1, 1 + 0x1p-9, 65504, 0}));
}

TEST_F(Safetensors, StoredValuesAreThoseThatAreReadBack) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16})
    for (const char* type : {"F64", "F32", "BF16", "F16"}) {
      const Tensor tensor = test::random_tensor({7, 5}, DType::kF64, 1).to(dtype);
      const Tensor view = tensor.transpose(0, 1);
      for (const Tensor& values : {tensor, view}) {
        write_sharded(dir_.path(""), "x", {source("t", type, values)});
        EXPECT_TRUE(test::bit_equal(stored_values(values, type, "t"),
                                    SafetensorsFile(path()).read("t").to(dtype)));
      }
    }
  EXPECT_THROW_WITH(stored_values(Tensor::full({1}, 1e6, DType::kF32), "F16", "big"), InputError,
                    "the tensor 'big' holds ");
}

TEST_F(Safetensors, NumbersBeyondTheLargestHalfAreRefused) {
  for (const double value : {65504.01, -1e30, HUGE_VAL})
    for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
      const Tensor tensor = Tensor::full({3}, value, dtype);
      EXPECT_THROW_WITH(write_sharded(dir_.path(""), "x", {source("big", "F16", tensor)}),
                        InputError, "the tensor 'big' holds ");
      EXPECT_FALSE(std::filesystem::exists(path()));
    }
}

TEST_F(Safetensors, ShardsAndTheirIndexAreWrittenOneTensorAtATime) {
  std::vector<TensorSource> sources;
  Tensor before;
  for (const char* name : {"a", "b", "c", "d"})
    sources.push_back({name, {1000, 3}, "BF16", [&before, n = sources.size()] {
                         EXPECT_TRUE(!before.defined() || before.sole_owner());
                         before = Tensor::full({1000, 3}, static_cast<double>(n), DType::kF32);
                         return before;
                       }});
  const std::vector<std::string> files = write_sharded(dir_.path(""), "model", sources, 13000);
  EXPECT_EQ(files, (std::vector<std::string>{"model-00001-of-00002.safetensors",
                                             "model-00002-of-00002.safetensors",
                                             "model.safetensors.index.json"}));
  const Json index = parse_json(test::read_file(dir_.path(files[2])), files[2]);
  EXPECT_EQ(index.at("metadata").at("total_size").as_int(), 24000);
  const SafetensorsFolder folder(dir_.path(""), "model");
  EXPECT_EQ(folder.files(), (std::vector<std::string>{files[0], files[1]}));
  for (size_t i = 0; i < sources.size(); ++i) {
    const SafetensorsFile* file = folder.find(sources[i].name);
    ASSERT_NE(file, nullptr);
    EXPECT_EQ(file->read(sources[i].name).to_vector<double>(),
              std::vector<double>(3000, static_cast<double>(i)));
    EXPECT_EQ(index.at("weight_map").at(sources[i].name).as_string(), files[i / 2]);
  }
}

TEST_F(Safetensors, KeepsEveryBit) {
  Tensor floats = Tensor::from(std::vector<float>{NAN, -NAN, INFINITY, -0.0f, 1e-45f}, {5});
  Tensor halves = Tensor::empty({65536}, DType::kBF16);
  for (int i = 0; i < 65536; ++i) halves.data<bf16>()[i].bits = static_cast<uint16_t>(i);
  write_safetensors(path(), {{"f", floats}, {"h", halves}});
  const SafetensorsFile file(path());
  EXPECT_TRUE(bit_equal(file.read("f"), floats));
  EXPECT_TRUE(bit_equal(file.read("h"), halves));
}

TEST_F(Safetensors, WritesViewsByTheirElements) {
  const Tensor matrix = test::random_tensor({4, 6}, DType::kF32, 2);
  write_safetensors(path(), {{"t", matrix.transpose(0, 1)}, {"n", matrix.narrow(1, 2, 3)}});
  const SafetensorsFile file(path());
  EXPECT_TRUE(bit_equal(file.read("t"), matrix.transpose(0, 1)));
  EXPECT_TRUE(bit_equal(file.read("n"), matrix.narrow(1, 2, 3)));
}

TEST_F(Safetensors, HeaderIsPaddedSoThatDataIsAligned) {
  for (size_t n = 1; n <= 8; ++n) {
    write_safetensors(path(), {{std::string(n, 'a'), Tensor::full({3}, 1, DType::kF32)}});
    const std::string text = test::read_file(path());
    uint64_t length;
    std::memcpy(&length, text.data(), sizeof length);
    EXPECT_EQ(length % 8, 0u);
    EXPECT_EQ(text.size(), 8 + length + 12);
    EXPECT_EQ(SafetensorsFile(path()).names(), std::vector<std::string>{std::string(n, 'a')});
  }
}

TEST_F(Safetensors, EqualTensorsGiveEqualFiles) {
  const NamedTensors tensors = {{"a", Tensor::full({3}, 1, DType::kF32)}};
  write_safetensors(path(), tensors);
  const std::string first = test::read_file(path());
  write_safetensors(path(), tensors);
  EXPECT_EQ(test::read_file(path()), first);
}

TEST_F(Safetensors, WritesNothing) {
  write_safetensors(path(), {});
  EXPECT_TRUE(SafetensorsFile(path()).names().empty());
}

TEST_F(Safetensors, WriterRefusesBrokenListsAndNamesThePath) {
  const Tensor t = Tensor::zeros({1}, DType::kF32);
  EXPECT_THROW_WITH(write_safetensors(path(), {{"a", t}, {"a", t}}), Error, "given twice");
  EXPECT_THROW_WITH(write_safetensors(path(), {{"__metadata__", t}}), Error, "reserved");
  EXPECT_THROW_WITH(write_sources(path(), {{"a", {2}, "F32", [&] { return t; }}}), Error,
                    "a: expected [2], got [1]");
  EXPECT_THROW_WITH(write_safetensors(dir_.path("none/x"), {{"a", t}}), Error,
                    "none/x: cannot be opened for writing: No such file or directory");
  EXPECT_THROW_WITH(write_safetensors("/dev/full", {{"a", t}}), Error,
                    "/dev/full: cannot be written: No space left on device");
}

TEST_F(Safetensors, UnknownTensorListsTheKnownOnes) {
  write_safetensors(
      path(), {{"a.w", Tensor::zeros({1}, DType::kF32)}, {"b.w", Tensor::zeros({1}, DType::kF32)}});
  const SafetensorsFile file(path());
  EXPECT_TRUE(file.contains("a.w"));
  EXPECT_FALSE(file.contains("c.w"));
  EXPECT_THROW_WITH(file.read("c.w"), InputError,
                    path() + ": has no tensor 'c.w'; it has: a.w, b.w");
  EXPECT_THROW_WITH(file.shape("c.w"), InputError, "has no tensor");
}

TEST_F(Safetensors, FilesThatShrinkWhileTheyAreOpenAreAnError) {
  write_safetensors(path(), {{"a", Tensor::zeros({1 << 20}, DType::kF32)}});
  const SafetensorsFile file(path());
  std::filesystem::resize_file(path(), 8192);
  EXPECT_THROW_WITH(file.read("a"), InputError, path() + ": cannot be read: it has become shorter");
}

TEST_F(Safetensors, RefusesPathsThatAreNotFiles) {
  EXPECT_THROW_WITH(SafetensorsFile(dir_.path("none")), InputError,
                    "none: cannot be opened: No such file or directory");
  EXPECT_THROW_WITH(SafetensorsFile(dir_.path()), InputError, "is a folder");
  test::write_file(path(), "");
  EXPECT_THROW_WITH(SafetensorsFile{path()}, InputError, "is truncated");
}

TEST_F(Safetensors, MetadataMayBeNull) {
  write(R"({"__metadata__":null,"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "1234");
  EXPECT_EQ(SafetensorsFile(path()).names(), std::vector<std::string>{"a"});
}

TEST_F(Safetensors, StoredValuesAreFinite) {
  for (const auto& [value, dtype, type] : {std::tuple{NAN, DType::kF32, "F32"},
                                           {INFINITY, DType::kF32, "F32"},
                                           {-INFINITY, DType::kF64, "F64"},
                                           {NAN, DType::kBF16, "BF16"},
                                           {NAN, DType::kF32, "F16"},
                                           {NAN, DType::kF32, "BF16"},
                                           {FLT_MAX, DType::kF32, "BF16"},
                                           {-FLT_MAX, DType::kF32, "BF16"},
                                           {FLT_MAX, DType::kF32, "F16"}}) {
    Tensor tensor = Tensor::zeros({300, 300}, dtype);
    EXPECT_NO_THROW(stored_values(tensor, type, "t"));
    tensor.narrow(0, 299, 1).narrow(1, 299, 1).fill_(value);
    EXPECT_THROW_WITH(stored_values(tensor, type, "t"), InputError, "the tensor 't' holds ");
  }
  Tensor wide = Tensor::full({2}, 1e300, DType::kF64);
  EXPECT_THROW_WITH(stored_values(wide, "F32", "t"), InputError, "holds inf as F32; hint: ");
  EXPECT_EQ(stored_values(wide, "F64", "t").to_vector<double>()[1], 1e300);
}

TEST_F(Safetensors, RefusesMalformedHeaders) {
  const std::string f = R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
  expect_refused("", "", "does not start with '{'");
  expect_refused(" {}", "", "does not start with '{'");
  expect_refused("[]", "", "does not start with '{'");
  expect_refused("{", "", "malformed header: not valid JSON");
  expect_refused("{\"a\":\"\xff\"}", "", "not valid JSON");
  expect_refused(R"({"a":)" + f + R"(,"a":)" + f + "}", "1234", "duplicate key 'a'");
  expect_refused(R"({"a":1})", "", "tensor 'a' needs dtype, shape and data_offsets");
  expect_refused(R"({"a":{"dtype":"F32","shape":[1]}})", "1234", "needs dtype");
  expect_refused(R"({"a":{"dtype":3,"shape":[1],"data_offsets":[0,4]}})", "1234", "needs dtype");
  expect_refused(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", "1234", "needs");
  expect_refused(R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", "1234", "needs");
  expect_refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", "1234", "needs");
  expect_refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}})", "1234", "needs");
  expect_refused(R"({"__metadata__":[]})", "", "__metadata__ is not an object");
  expect_refused(R"({"__metadata__":{"a":1}})", "", "__metadata__ 'a' is not text");
  expect_refused(std::string(3000, '{'), "", "malformed header");
}

TEST_F(Safetensors, RefusesInconsistentLayouts) {
  const auto entry = [](const char* dtype, const char* shape, const char* offsets) {
    return str("{\"dtype\":\"", dtype, "\",\"shape\":", shape, ",\"data_offsets\":", offsets, "}");
  };
  const auto one = [&](const std::string& e) { return "{\"a\":" + e + "}"; };
  const auto two = [&](const std::string& a, const std::string& b) {
    return "{\"a\":" + a + ",\"b\":" + b + "}";
  };
  expect_refused(one(entry("F32", "[1]", "[0,8]")), "1234", "damaged");
  expect_refused(one(entry("F32", "[1]", "[4,0]")), "1234", "damaged");
  expect_refused(one(entry("F32", "[2]", "[0,4]")), "1234", "shape and dtype contradict");
  expect_refused(one(entry("F64", "[1]", "[0,4]")), "1234", "shape and dtype contradict");
  expect_refused(one(entry("F32", "[4294967296,4294967296,4]", "[0,0]")), "", "contradict");
  expect_refused(one(entry("F32", "[9223372036854775807]", "[0,4]")), "1234", "contradict");
  expect_refused(one(entry("U8", "[1]", "[9223372036854775806,9223372036854775807]")), "1", "lies");
  expect_refused(one(entry("F12", "[2]", "[0,4]")), "1234", "dtype F12, which is not known");
  expect_refused(one(entry("F32", "[1,1,1,1,1,1,1]", "[0,4]")), "1234", "7 dimensions");
  expect_refused(one(entry("F32", "[1]", "[0,4]")), "12345", "1 bytes follow the last tensor");
  expect_refused(one(entry("F32", "[1]", "[4,8]")), "12345678", "leave a hole at byte 0");
  expect_refused(two(entry("U8", "[4]", "[0,4]"), entry("U8", "[4]", "[2,6]")), "123456",
                 "overlap at byte 2");
  expect_refused(two(entry("U8", "[2]", "[0,2]"), entry("U8", "[2]", "[4,6]")), "123456",
                 "leave a hole at byte 2");
  expect_refused("{}", "1", "1 bytes follow");
}

TEST_F(Safetensors, RefusesHeaderLengthsBeyondTheFile) {
  for (const uint64_t length : {uint64_t{3}, uint64_t{100}, uint64_t{100'000'001}, UINT64_MAX,
                                UINT64_MAX - 7, uint64_t{1} << 63}) {
    const std::string text(reinterpret_cast<const char*>(&length), sizeof length);
    test::write_file(path(), text + "{}");
    EXPECT_THROW_WITH(SafetensorsFile{path()}, InputError, "is truncated or not in safetensors");
  }
}

// Replaces a file by a new one: file systems flush a file that is truncated and rewritten, and
// thousands of flushes are slow.
void replace_file(const std::string& path, const std::string& text) {
  std::filesystem::remove(path);
  test::write_file(path, text);
}

// True if all tensors can be read, false on InputError; any other failure fails the test.
bool readable(const std::string& path) {
  try {
    const SafetensorsFile file(path);
    for (const std::string& name : file.names()) file.read(name);
    return true;
  } catch (const InputError&) {
    return false;
  }
}

TEST_F(Safetensors, TruncationAnywhereIsNoticed) {
  write_safetensors(path(), {{"a", test::random_tensor({3, 4}, DType::kF32, 1)},
                             {"b", Tensor::full({5}, 1, DType::kU8)}});
  const std::string whole = test::read_file(path());
  ASSERT_TRUE(readable(path()));
  for (size_t size = 0; size < whole.size(); ++size) {
    replace_file(path(), whole.substr(0, size));
    ASSERT_FALSE(readable(path())) << size << " of " << whole.size() << " bytes";
  }
  replace_file(path(), whole + "x");
  EXPECT_FALSE(readable(path()));
}

TEST_F(Safetensors, RandomDamageNeverCrashes) {
  write_safetensors(path(), {{"a", test::random_tensor({3, 4}, DType::kF32, 1)},
                             {"b", Tensor::full({5}, 1, DType::kU8)},
                             {"c", Tensor::full({2, 2}, 1, DType::kI64)}});
  std::string whole = test::read_file(path());
  uint64_t length;
  std::memcpy(&length, whole.data(), sizeof length);
  ASSERT_TRUE(readable(path()));
  const auto header_end = static_cast<int64_t>(8 + length);
  const std::string_view likely = "0123456789,:[]{}\"-.eEF \\\x80\xff";
  Rng rng(3, rng_stream(kTestPurpose));
  int refused = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string damaged = whole;
    for (int64_t flips = rng.between(1, 3); flips > 0; --flips)
      damaged[static_cast<size_t>(rng.below(header_end))] =
          likely[static_cast<size_t>(rng.below(static_cast<int64_t>(likely.size())))];
    replace_file(path(), damaged);
    refused += !readable(path());
  }
  // Damage to names, metadata and padding can leave a valid file.
  EXPECT_GT(refused, 1500);
}

TEST_F(Safetensors, ReadsAModelWrittenElsewhere) {
  COHORT_REQUIRE_DATA(dir);
  const std::string model = dir + "/models/stories260K/model.safetensors";
  const SafetensorsFile file(model);
  EXPECT_EQ(file.shape("model.embed_tokens.weight"), (Shape{512, 64}));
  EXPECT_EQ(file.dtype("model.embed_tokens.weight"), DType::kF32);
  int64_t parameters = 0;
  NamedTensors tensors;
  for (const std::string& name : file.names()) {
    tensors.emplace_back(name, file.read(name));
    parameters += tensors.back().second.numel();
    for (const double x : tensors.back().second.to_vector<double>()) ASSERT_LT(std::abs(x), 100);
  }
  EXPECT_EQ(parameters * 4, 1040128);  // the end of its last tensor: "260K" parameters in f32
  write_safetensors(path(), tensors);
  const SafetensorsFile copy(path());
  for (const auto& [name, tensor] : tensors) EXPECT_TRUE(bit_equal(copy.read(name), tensor));
}

}  // namespace
}  // namespace cohort
