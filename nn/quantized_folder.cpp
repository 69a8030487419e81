#include "nn/quantized_folder.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "nn/lora.h"
#include "nn/model_folder.h"
#include "text/tokenizers/json_fields.h"

namespace cohort {

using kernels::QuantizedWeight;
using kernels::WeightFormat;

namespace {

constexpr const char* kState = ".quant_state.bitsandbytes__nf4";

// "model.layers.0.mlp.up_proj.weight" -> "model.layers.0.mlp.up_proj.SCB".
std::string row_scales_of(const std::string& weight) {
  return weight.substr(0, weight.rfind('.')) + ".SCB";
}

// The tensors of one weight.
class Parts {
 public:
  Parts(const SafetensorsFolder& folder, std::string name, std::set<std::string>& used)
      : folder_(folder), name_(std::move(name)), used_(used) {}

  [[noreturn]] void fail(const std::string& message) const {
    throw InputError(str(folder_.path(), ": ", name_, ": ", message));
  }
  // The tensor with this dtype and number of elements, flat.
  Tensor read(const std::string& name, DType dtype, int64_t count) const {
    const SafetensorsFile* file = folder_.find(name);
    if (file == nullptr)
      fail(str("there is no tensor '", name, "' beside it; hint: is the download complete?"));
    if (file->dtype(name) != dtype || file->shape(name).numel() != count)
      fail(str("expected ", count, " numbers of type ", dtype_name(dtype), " in ", name, ", found ",
               file->stored_dtype(name), file->shape(name).str()));
    used_.insert(name);
    return file->read(name).reshape({count});
  }
  std::vector<float> numbers(const std::string& name, int64_t count) const {
    const std::vector<float> out = read(name, DType::kF32, count).to_vector<float>();
    if (!std::ranges::all_of(out, [](float x) { return std::isfinite(x); }))
      fail(name + " has a number that is not finite");
    return out;
  }
  // The fields of the tensor of bytes `name`.
  Json fields(const std::string& name) const {
    const SafetensorsFile* file = folder_.find(name);
    const auto bytes = read(name, DType::kU8, file->shape(name).numel()).to_vector<char>();
    return parse_json({bytes.data(), bytes.size()}, folder_.path() + ": " + name);
  }

 private:
  const SafetensorsFolder& folder_;
  std::string name_;
  std::set<std::string>& used_;
};

void read_nf4(const Parts& parts, const std::string& name, QuantizedWeight& out) {
  const std::string state = name + kState;
  const Json fields = parts.fields(state);
  const auto expect = [&](const char* field, int64_t value) {
    const Json& found = fields.get_or_null(field);
    if (!found.is_int() || found.as_int() != value)
      parts.fail(
          str(field, " of ", state, " is ", found.dump(), ", and only ", value, " is supported"));
  };
  const int64_t rows = out.values.dim(0), columns = out.columns, count = out.scales.numel();
  expect("blocksize", out.group());
  if (const std::string* type = fields.find_text("quant_type"); type == nullptr || *type != "nf4")
    parts.fail(str("quant_type of ", state, " is not nf4"));
  const Json& shape = fields.get_or_null("shape");
  if (shape.dump() != Json(Json::Array{out.values.dim(0), out.columns}).dump())
    parts.fail(str("shape of ", state, " is ", shape.dump(), ", expected [", out.values.dim(0),
                   ", ", out.columns, "]"));
  if (columns % out.group() != 0)
    parts.fail(str("rows of ", columns, " numbers do not begin with a block of ", out.group(),
                   "; hint: use the folder of the 16-bit model with precision.base=nf4"));
  const std::vector<float> table = parts.numbers(name + ".quant_map", 16);
  for (int i = 0; i < 16; ++i)
    if (table[static_cast<size_t>(i)] != kernels::nf4_value(i))
      parts.fail("quant_map is not that of nf4");
  out.values = parts.read(name, DType::kU8, rows * columns / 2).reshape({rows, columns / 2});
  const std::span<float> scales(out.scales.data<float>(), static_cast<size_t>(count));
  if (fields.find("nested_blocksize") == nullptr) {
    std::ranges::copy(parts.numbers(name + ".absmax", count), scales.begin());
    return;
  }
  constexpr int64_t kBlock = 256;
  expect("nested_blocksize", kBlock);
  const Json& offset = fields.get_or_null("nested_offset");
  if (!offset.is_number() || !std::isfinite(offset.as_double()))
    parts.fail(str("nested_offset of ", state, " is no finite number"));
  const auto bytes = parts.read(name + ".absmax", DType::kU8, count).to_vector<uint8_t>();
  kernels::expand_scales(scales, bytes, parts.numbers(name + ".nested_quant_map", 256),
                         parts.numbers(name + ".nested_absmax", ceil_div(count, kBlock)), kBlock,
                         static_cast<float>(offset.as_double()));
}

// One scale for each row, times 127.
void read_int8(const Parts& parts, const SafetensorsFolder& folder, const std::string& name,
               const std::string& row_scales, QuantizedWeight& out) {
  const int64_t rows = out.values.dim(0), groups = out.scales.dim(1);
  if (const Shape found = folder.find(name)->shape(name); found != out.values.shape())
    parts.fail(str("expected shape ", out.values.shape().str(), ", found ", found.str()));
  if (const std::string format = name + "_format"; folder.find(format) != nullptr)
    if (const int value = parts.read(format, DType::kU8, 1).to_vector<int>()[0]; value != 0)
      parts.fail(str(format, " is ", value, ": its rows are in tiles, which only old GPUs read"));
  out.values = parts.read(name, DType::kI8, out.values.numel()).reshape(out.values.shape());
  const std::vector<float> scales = parts.numbers(row_scales, rows);
  for (int64_t i = 0; i < rows * groups; ++i)
    out.scales.data<float>()[i] = scales[static_cast<size_t>(i / groups)] / 127;
}

}  // namespace

WeightFormat whole_format(const std::string& dir, const ModelConfig& config) {
  if (config.stored_format == WeightFormat::kModel || config.is_encoder())
    return WeightFormat::kModel;
  const SafetensorsFolder folder(dir, "model");
  for (const AdapterTarget& module : linear_modules(config))
    for (int64_t layer = 0; layer < config.num_layers; ++layer) {
      const std::string weight =
          find_weight(folder, layer_name(module.name, layer) + ".weight").second;
      if (folder.find(weight + kState) == nullptr && folder.find(row_scales_of(weight)) == nullptr)
        return WeightFormat::kModel;
    }
  return config.stored_format;
}

QuantizedWeight read_quantized(const SafetensorsFolder& folder, const std::string& name,
                               const Shape& shape, std::set<std::string>& used) {
  if (!name.ends_with(".weight")) return {};
  const std::string row_scales = row_scales_of(name);
  const bool is_nf4 = folder.find(name + kState) != nullptr;
  if (!is_nf4 && folder.find(row_scales) == nullptr) return {};
  const Parts parts(folder, name, used);
  if (shape.rank() != 2) parts.fail("expected numbers, found a matrix in 8 or 4 bits");
  QuantizedWeight out =
      QuantizedWeight::empty(is_nf4 ? WeightFormat::kNf4 : WeightFormat::kInt8, shape);
  if (is_nf4)
    read_nf4(parts, name, out);
  else
    read_int8(parts, folder, name, row_scales, out);
  const float* const scales = out.scales.data<float>();
  const float largest = is_nf4 ? 1 : 127;
  if (!std::all_of(scales, scales + out.scales.numel(), [&](float s) {
        return std::isfinite(kernels::weight_value(s, largest)) &&
               std::isfinite(kernels::weight_value(s, -largest));
      }))
    parts.fail("some numbers are not finite");
  return out;
}

}  // namespace cohort
