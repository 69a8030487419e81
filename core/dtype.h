// Element types and the dtype dispatch: calls a templated lambda with the C++ type.
//
//   dispatch_float(x.dtype(), "rms_norm", [&]<class T>() { run<T>(x.data<T>()); });
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "core/check.h"

namespace cohort {

enum class DType : uint8_t { kF64, kF32, kBF16, kI32, kI64, kU8 };

// Upper half of an IEEE f32. A storage type: arithmetic is done in f32. Rounds to nearest even;
// NaN stays NaN.
struct bf16 {
  uint16_t bits = 0;
  bf16() = default;
  explicit bf16(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
    bits = nan ? static_cast<uint16_t>((u >> 16) | 0x40u)
               : static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  explicit operator float() const {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
  explicit operator double() const { return static_cast<float>(*this); }
};

template <class T>
inline constexpr auto dtype_of = nullptr;  // undefined for other types
template <>
inline constexpr DType dtype_of<double> = DType::kF64;
template <>
inline constexpr DType dtype_of<float> = DType::kF32;
template <>
inline constexpr DType dtype_of<bf16> = DType::kBF16;
template <>
inline constexpr DType dtype_of<int32_t> = DType::kI32;
template <>
inline constexpr DType dtype_of<int64_t> = DType::kI64;
template <>
inline constexpr DType dtype_of<uint8_t> = DType::kU8;

constexpr size_t dtype_size(DType dtype) {
  constexpr size_t kSizes[] = {8, 4, 2, 4, 8, 1};
  return kSizes[static_cast<int>(dtype)];
}

constexpr const char* dtype_name(DType dtype) {
  constexpr const char* kNames[] = {"f64", "f32", "bf16", "i32", "i64", "u8"};
  return kNames[static_cast<int>(dtype)];
}

constexpr bool is_float(DType dtype) {
  return dtype == DType::kF64 || dtype == DType::kF32 || dtype == DType::kBF16;
}

// Dtype of accumulators, statistics and weight gradients of `dtype`: f32 for bf16, else itself.
constexpr DType accumulate_dtype(DType dtype) {
  return dtype == DType::kBF16 ? DType::kF32 : dtype;
}

// Calls fn.operator()<T>() for the CPU compute types f64 and f32. Throws Error naming `op` for
// other dtypes.
template <class F>
decltype(auto) dispatch_float(DType dtype, const char* op, F&& fn) {
  COHORT_CHECK(dtype == DType::kF64 || dtype == DType::kF32, "[", op, "] expected f64 or f32, got ",
               dtype_name(dtype));
  return dtype == DType::kF64 ? fn.template operator()<double>() : fn.template operator()<float>();
}

// Calls fn.operator()<T>() for every element type: for copies and conversions.
template <class F>
decltype(auto) dispatch_all(DType dtype, F&& fn) {
  if (dtype == DType::kF64) return fn.template operator()<double>();
  if (dtype == DType::kF32) return fn.template operator()<float>();
  if (dtype == DType::kBF16) return fn.template operator()<bf16>();
  if (dtype == DType::kI32) return fn.template operator()<int32_t>();
  if (dtype == DType::kI64) return fn.template operator()<int64_t>();
  return fn.template operator()<uint8_t>();
}

}  // namespace cohort
