// Checks the tensors of a call against a spec, and names their sizes:
//
//   ArgumentCheck check("rope");
//   check("[T, H, D] x, y; i32 [T] positions; accumulate [P, D] table?", x, y, positions, table);
//   const int64_t tokens = check["T"];
//
// A spec has declarations, separated by semicolons: dtype, layout and sizes of tensors, and their
// names. A tensor whose name ends in "?" may be undefined.
//
//   dtype       i32, f64, ...; any; accumulate: accumulate_dtype() of the default. The default is
//               that of the first tensor without a dtype.
//   layout      strided: t[i] starts at i * strides()[0] and is contiguous, as in columns of a
//               wider matrix; view: the last dimension is contiguous. By default the tensor is.
//   [T, 2 F]    Numbers, names, "2 F" and "S + 1". A name has one value in a check: that of the
//               first tensor that has it, or of bind(). "G F" multiplies by the value of G.
//   [..., C]    "..." stands for any sizes, the same wherever it stands in a check. Of the first
//               tensor that has it, `rows` is rows() and `numel` numel().
//   (M, K)      Any sizes, seen as the matrix [numel / last, last].
//
// The compiler reads specs: one with an error, or for another number of tensors, does not compile.
// All tensors are on one device. A mismatch throws Error("[rope] expected positions i32[3] = [T],
// where T = 3 as in x, got i32[4] on cpu").
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "kernels/common.h"

namespace cohort::kernels {

// factor multiple name + offset. An empty name stands for 0, "..." for any sizes.
struct SizeSpec {
  std::string_view multiple = {}, name = {};
  int64_t factor = 1, offset = 0;
};
struct ArgumentSpec {
  std::string_view name, dtype, layout, text;  // an empty dtype or layout is the default
  std::array<SizeSpec, 4> sizes;
  size_t num_sizes = 0;
  bool is_matrix = false, is_optional = false;
};

// Reads a spec from left to right. A throw ends the compilation.
struct SpecReader {
  std::string_view text;

  constexpr bool skip(std::string_view token) {
    while (text.starts_with(' ')) text.remove_prefix(1);
    const bool found = text.starts_with(token);
    if (found) text.remove_prefix(token.size());
    return found;
  }
  constexpr std::string_view word() {
    skip("");
    const std::string_view out = text.substr(0, text.find_first_of(" ,;?+[]()"));
    text.remove_prefix(out.size());
    return out;
  }
  constexpr int64_t number() {
    int64_t n = 0;
    for (skip(" "); !text.empty() && text[0] >= '0' && text[0] <= '9'; text.remove_prefix(1))
      n = 10 * n + text[0] - '0';
    return n;
  }
  static constexpr bool is_dtype(std::string_view name) {
    for (int i = 0; i <= static_cast<int>(DType::kI8); ++i)
      if (name == dtype_name(static_cast<DType>(i))) return true;
    return name == "any" || name == "accumulate";
  }
  constexpr SizeSpec size() {
    skip("");
    const bool has_number = !text.empty() && text[0] >= '0' && text[0] <= '9';
    const int64_t n = number();
    SizeSpec out{.multiple = word(), .name = word()};
    if (out.name.empty()) std::swap(out.multiple, out.name);
    if (out.name.empty() && !has_number) throw "expected a size";
    if (out.name.empty()) return {.offset = n};
    if (n != 0) out.factor = n;
    if (skip("+")) out.offset = number();
    return out;
  }
  constexpr ArgumentSpec declaration() {
    ArgumentSpec out;
    for (auto next = word(); !next.empty(); next = word()) {
      const bool is_layout = next == "strided" || next == "view";
      if (!is_layout && !is_dtype(next)) throw "expected a dtype or a layout";
      (is_layout ? out.layout : out.dtype) = next;
    }
    const std::string_view begin = text;
    out.is_matrix = skip("(");
    if (!out.is_matrix && !skip("[")) throw "expected sizes";
    do out.sizes[out.num_sizes++] = size();
    while (skip(","));
    if (!skip(out.is_matrix ? ")" : "]")) throw "expected the end of the sizes";
    out.text = begin.substr(0, begin.size() - text.size());
    return out;
  }
};

// The spec of N tensors.
template <size_t N>
struct CallSpec {
  std::array<ArgumentSpec, N> arguments;

  consteval CallSpec(const char* text) {
    SpecReader in{text};
    size_t n = 0;
    do {
      const ArgumentSpec declared = in.declaration();
      do {
        ArgumentSpec& spec = arguments[n++] = declared;
        spec.name = in.word();
        if (spec.name.empty()) throw "expected a name";
        spec.is_optional = in.skip("?");
      } while (in.skip(","));
    } while (in.skip(";"));
    if (n != N || !in.text.empty()) throw "expected one name for each tensor";
  }
};

class ArgumentCheck {
 public:
  explicit ArgumentCheck(const char* op, std::optional<Device> device = {})
      : op_(op), device_(device) {}

  ArgumentCheck& bind(std::string_view name, int64_t value) {
    values_.at(num_values_++) = {name, value, ""};
    return *this;
  }
  template <class... Tensors>  // Tensor or GradOut
  ArgumentCheck& operator()(const CallSpec<sizeof...(Tensors)>& spec, const Tensors&... tensors) {
    const ArgumentSpec* next = spec.arguments.data();
    (check(*next++, tensors), ...);
    return *this;
  }
  // The value of a name, or -1.
  int64_t operator[](std::string_view name) const;
  // Throws Error("[op] ...") with the other arguments as its message if the condition is false.
  template <class... Parts>
  void require(bool condition, const Parts&... message) const {
    if (!condition) [[unlikely]]
      fail(str(text_of(message)...));
  }

 private:
  struct Value {
    std::string_view name;
    int64_t value = 0;
    std::string_view argument;  // the first that has it
  };

  template <class T>
  static const T& text_of(const T& part) {
    return part;
  }
  static std::string text_of(const Tensor& t) {
    return t.defined() ? t.str() : "an undefined tensor";
  }
  [[noreturn]] void fail(const std::string& message) const;
  void check(const ArgumentSpec& spec, const Tensor& t);
  void check(const ArgumentSpec& spec, const GradOut& grad) { check(spec, grad.tensor); }
  // The sizes that t should have. Names without a value get that of t; -1: it has too few sizes.
  Shape sizes(const ArgumentSpec& spec, const Tensor& t);
  // ", where T = 3 as in x" for the names of a spec that other arguments have given values.
  std::string origins(const ArgumentSpec& spec) const;

  const char* op_;
  std::optional<Device> device_;
  std::optional<DType> dtype_;
  std::optional<Shape> rest_;  // the sizes of "..."
  std::array<Value, 16> values_;
  size_t num_values_ = 0;
};

}  // namespace cohort::kernels
