// Optimizer state in the host's memory has the bits of state on the device.
#include "trainers/host_state.h"

#include "data/safetensors.h"
#include "tests/support/tensor_files.h"
#include "tests/support/test_util.h"
#include "trainers/optimizer.h"

namespace cohort::test {
namespace {

struct Kind {
  DType dtype;
  MomentKind moments;
};
constexpr Kind kKinds[] = {{DType::kF32, MomentKind::kF32},
                           {DType::kF32, MomentKind::kBF16},
                           {DType::kBF16, MomentKind::kF32},
                           {DType::kBF16, MomentKind::kBF16},
                           {DType::kF64, MomentKind::kF32}};

// AdamW trains f64 on the CPU only, and bf16 on CUDA only.
bool is_supported(const Kind& kind, Device device) {
  return kind.dtype != (device.is_cuda() ? DType::kF64 : DType::kBF16);
}

// Parameters of odd sizes in three units, one with padding rows in memory.
struct Parameters {
  Parameters(DType dtype, Device device) : set(dtype, device, 1) {
    set.add({.name = "table",
             .shape = {61, 7},
             .use = ParameterUse::kMatmul,
             .init = 1,
             .leaf_rows = 64});
    set.begin_unit();
    set.add({"a", {65}, ParameterUse::kVector, 1});
    set.add({"b", {33, 5}, ParameterUse::kMatmul, 1});
    set.begin_unit();
    set.add({"c", {3}, ParameterUse::kVector, 1});
  }
  void set_gradients(uint64_t step) {
    uint64_t seed = 100 * step;
    for (const NamedParameter& p : set)
      p.grad().copy_(random_tensor(p.value.shape(), DType::kF64, ++seed)
                         .to(p.grad().dtype())
                         .to(p.grad().device()));
  }
  std::vector<Tensor> values() const {
    std::vector<Tensor> out;
    for (const NamedParameter& p : set) out.push_back(p.value.contiguous().to(Device{}));
    return out;
  }
  ParameterSet set;
};

OptimizerConfig config_of(const Kind& kind, StatePlace place, int64_t host_units = 0) {
  OptimizerConfig config;
  config.weight_decay = 0.1;
  config.max_grad_norm = 0.5;
  config.storage.moments = kind.moments;
  config.storage.place = place;
  config.storage.host_units = host_units;
  return config;
}

void expect_equal_state(Optimizer& a, Optimizer& b) {
  const NamedTensors left = tensors_of(a.state_sources()), right = tensors_of(b.state_sources());
  ASSERT_EQ(left.size(), right.size());
  for (size_t i = 0; i < left.size(); ++i) {
    EXPECT_EQ(left[i].first, right[i].first);
    EXPECT_TRUE(bit_equal(left[i].second.to(Device{}), right[i].second.to(Device{})))
        << left[i].first;
  }
}

// The values of all parameters, one after the other, those of bf16 from their masters.
std::vector<double> trained_values(Optimizer& optimizer, const Parameters& parameters) {
  std::vector<Tensor> tensors;
  for (const auto& [name, tensor] : tensors_of(optimizer.state_sources()))
    if (name.ends_with(".master")) tensors.push_back(tensor);
  std::vector<double> out;
  for (const Tensor& tensor : tensors.empty() ? parameters.values() : tensors)
    for (const double value : tensor.to_vector<double>()) out.push_back(value);
  return out;
}

// Twenty updates with each number of units on the host, one of which is not made as its norm is
// not finite.
void expect_the_bits_of_the_device(Device device) {
  for (const Kind& kind : kKinds) {
    if (!is_supported(kind, device)) continue;
    for (const int64_t units : {0, 1, 2, 3}) {
      SCOPED_TRACE(str(dtype_name(kind.dtype), " ", static_cast<int>(kind.moments), " ", units));
      Parameters on_device(kind.dtype, device), on_host(kind.dtype, device);
      const auto expected = std::make_unique<Optimizer>(on_device.set,
                                                        config_of(kind, StatePlace::kDevice), 3),
                 actual = std::make_unique<Optimizer>(on_host.set,
                                                      config_of(kind, StatePlace::kHost, units), 3);
      for (uint64_t step = 0; step < 20; ++step) {
        const Tensor norm = Tensor::full({1}, step == 7 ? INFINITY : 1.5, DType::kF64, device);
        for (Parameters* p : {&on_device, &on_host}) p->set_gradients(step);
        expected->step(0.01, norm);
        actual->step(0.01, norm);
        actual->free_workspace();
      }
      const std::vector<Tensor> a = on_device.values(), b = on_host.values();
      for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(bit_equal(a[i], b[i])) << i;
      EXPECT_EQ(expected->sample_weights(), trained_values(*expected, on_device));
      EXPECT_EQ(actual->sample_weights(), trained_values(*expected, on_device));
      expect_equal_state(*expected, *actual);
    }
  }
}

TEST(HostState, HasTheBitsOfTheDevice) {
  expect_the_bits_of_the_device({});
}
TEST(CudaHostState, HasTheBitsOfTheDevice) {
  COHORT_REQUIRE_GPU(device);
  expect_the_bits_of_the_device(device);
}

// Chunks of 64 elements cut tensors, use each buffer many times, and give the same bits.
void expect_chunks_change_nothing(Device device) {
  for (const Kind& kind : kKinds) {
    if (!is_supported(kind, device)) continue;
    const DType accumulated = accumulate_dtype(kind.dtype);
    const DType moments = kind.moments == MomentKind::kBF16 && accumulated == DType::kF32
                              ? DType::kBF16
                              : accumulated;
    const bool split = kind.dtype == DType::kBF16;
    std::vector<Tensor> weights, results, grads;
    const auto tensors = [&](bool host) {
      std::vector<kernels::AdamWTensor> out;
      uint64_t seed = 0;
      for (const int64_t n : {1, 64, 1000, 4097, 63}) {
        const auto zeros = [&](int64_t size, DType dtype) {
          return host ? Tensor::pinned({size}, dtype) : Tensor::zeros({size}, dtype, device);
        };
        out.push_back({.param = random_tensor({n}, DType::kF32, ++seed).to(kind.dtype).to(device),
                       .m = zeros(n, moments),
                       .v = zeros(n, moments),
                       .weight_decay = 0.1,
                       .low_bits = split ? zeros(2 * n, DType::kU8) : Tensor(),
                       .unit = 3,
                       .flat_index = 64 * static_cast<int64_t>(seed) + (n == 63 ? 1 : 0)});
      }
      return out;
    };
    const auto step = [&](std::vector<kernels::AdamWTensor>& all, int64_t number,
                          const std::function<void(const kernels::AdamWDesc&)>& run) {
      uint64_t seed = 10 * static_cast<uint64_t>(number);
      for (kernels::AdamWTensor& t : all)
        t.grad = random_tensor(t.param.shape(), DType::kF32, ++seed).to(accumulated).to(device);
      run({.learning_rate = 0.01, .step = number, .seed = 5});
    };
    std::vector<kernels::AdamWTensor> expected = tensors(false);
    for (int64_t number = 1; number <= 5; ++number)
      step(expected, number, [&](const auto& desc) { kernels::adamw_step(expected, desc); });
    for (const int64_t chunk : {int64_t{64}, int64_t{1024}, HostState::kChunk}) {
      SCOPED_TRACE(str(dtype_name(kind.dtype), " in chunks of ", chunk));
      std::vector<kernels::AdamWTensor> actual = tensors(true);
      HostState state(actual, chunk);
      for (int64_t number = 1; number <= 5; ++number) {
        state.allocate_buffers();
        step(actual, number, [&](const auto& desc) { state.step(actual, desc); });
        state.free_buffers();
      }
      state.synchronize();
      for (size_t i = 0; i < actual.size(); ++i) {
        const auto equal = [&](const Tensor& a, const Tensor& b) {
          return bit_equal(a.to(Device{}), b.to(Device{}));
        };
        EXPECT_TRUE(equal(actual[i].param, expected[i].param)) << i;
        EXPECT_TRUE(equal(actual[i].m, expected[i].m)) << i;
        EXPECT_TRUE(equal(actual[i].v, expected[i].v)) << i;
        if (split) {
          EXPECT_TRUE(equal(actual[i].low_bits, expected[i].low_bits)) << i;
        }
      }
    }
  }
}

TEST(HostState, ChunksChangeNoBit) {
  expect_chunks_change_nothing({});
}
TEST(CudaHostState, ChunksChangeNoBit) {
  COHORT_REQUIRE_GPU(device);
  expect_chunks_change_nothing(device);
}

// The file of one place is that of the other, and is read by the other.
void expect_files_serve_either_place(Device device) {
  const TempDir dir;
  for (const Kind& kind : kKinds) {
    if (!is_supported(kind, device)) continue;
    const auto file = [&](StatePlace place) {
      return dir.path(place == StatePlace::kHost ? "host.safetensors" : "device.safetensors");
    };
    const StatePlace places[] = {StatePlace::kDevice, StatePlace::kHost};
    std::vector<std::vector<Tensor>> ends;
    for (const StatePlace first : places)
      for (const StatePlace second : places) {
        Parameters p(kind.dtype, device);
        auto optimizer = std::make_unique<Optimizer>(p.set, config_of(kind, first, 2), 3);
        for (uint64_t step = 0; step < 6; ++step) {
          if (step == 3) {
            write_safetensors(file(first), tensors_of(optimizer->state_sources()));
            optimizer = std::make_unique<Optimizer>(p.set, config_of(kind, second, 2), 3);
            optimizer->load(safetensors_at(file(first)), 3);
          }
          p.set_gradients(step);
          optimizer->step(0.01, {});
        }
        ends.push_back(p.values());
        for (const auto& [name, tensor] : tensors_of(optimizer->state_sources()))
          ends.back().push_back(tensor.clone().to(Device{}));
      }
    EXPECT_EQ(read_file(file(StatePlace::kDevice)), read_file(file(StatePlace::kHost)));
    for (const std::vector<Tensor>& end : ends)
      for (size_t i = 0; i < end.size(); ++i) EXPECT_TRUE(bit_equal(end[i], ends[0][i])) << i;
  }
}

TEST(HostState, FilesServeEitherPlace) {
  expect_files_serve_either_place({});
}
TEST(CudaHostState, FilesServeEitherPlace) {
  COHORT_REQUIRE_GPU(device);
  expect_files_serve_either_place(device);
}

// Bytes by place: whole tensors without size classes, and a workspace of three chunks at most.
TEST(HostState, BytesAreCountedWhereTheyAre) {
  ModelConfig c;
  c.num_layers = 3;
  c.d_model = 512;
  c.num_heads = 8;
  c.vocab_size = 4096;
  c.resolve();
  const auto bytes = [&](StatePlace place, int64_t units = 0) {
    OptimizerConfig config;
    config.storage.place = place;
    config.storage.host_units = units;
    return optimizer_bytes(config, c, DType::kBF16, Device::cuda());
  };
  const OptimizerBytes device = bytes(StatePlace::kDevice), host = bytes(StatePlace::kHost),
                       some = bytes(StatePlace::kHost, 2);
  EXPECT_EQ(device.pinned, 0);
  EXPECT_EQ(device.workspace, 0);
  EXPECT_EQ(host.memory, 0);
  EXPECT_NEAR(static_cast<double>(host.pinned) / static_cast<double>(device.memory), 1, 0.001);
  EXPECT_GT(host.workspace, 0);
  EXPECT_LE(host.workspace, 3 * HostState::kChunk * 10 + 4096);
  EXPECT_NEAR(static_cast<double>(some.pinned + some.memory) / static_cast<double>(device.memory),
              1, 0.001);
  EXPECT_GT(some.memory, 0);
  EXPECT_GT(some.pinned, 0);
  for (const OptimizerBytes& b : {host, some}) EXPECT_EQ(b.saved, device.saved);
}

}  // namespace
}  // namespace cohort::test
