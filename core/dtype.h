// Element types and the dtype dispatch: calls a templated lambda with the C++ type.
//
//   dispatch_float(x.dtype(), "rms_norm", [&]<class T>() { run<T>(x.data<T>()); });
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/check.h"
#include "core/host_device.h"

namespace cohort {

enum class DType : uint8_t { kF64, kF32, kBF16, kI32, kI64, kU8, kF16, kE4M3, kI8 };

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

// IEEE half precision, for exchange and conversion only: no op computes in it. Rounds to nearest
// even, beyond 65504 to infinity; NaN stays NaN.
struct f16 {
  uint16_t bits = 0;
  f16() = default;
  explicit f16(double value) {
    const double magnitude = std::abs(value);
    uint64_t u = 0x7c00;  // infinity
    if (std::isnan(value)) {
      u = 0x7e00;
    } else if (magnitude < 0x1p-14) {
      // The last bit of the sum counts 2^-24, the step of subnormals.
      u = std::bit_cast<uint64_t>(magnitude + 0x1p28);
    } else if (magnitude < 65520) {
      u = std::bit_cast<uint64_t>(magnitude) - (uint64_t{1023 - 15} << 52);
      u = (u + (uint64_t{1} << 41) - 1 + (u >> 42 & 1)) >> 42;
    }
    bits = static_cast<uint16_t>((u & 0x7fff) | (std::signbit(value) ? 0x8000 : 0));
  }
  explicit operator float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
    if (magnitude >= 0x7c00)  // infinity, NaN
      return std::bit_cast<float>(sign | 0x7f800000 | magnitude << 13);
    // Multiplication by 2^112 is exact and normalises subnormals.
    return std::bit_cast<float>(sign | magnitude << 13) * 0x1p112f;
  }
};

// FP8 with 4 bits of exponent and 3 of mantissa, without infinities ("E4M3" of Micikevicius et al.
// 2022; torch's float8_e4m3fn): 448 is the largest number, 2^-9 the least subnormal, 0x7f and 0xff
// are NaN. A storage type; the same bits on host and device. Rounds to nearest even; finite numbers
// beyond 448 become 448, infinities NaN, and the sign stays. Wider types are rounded to f32 first.
struct e4m3 {
  uint8_t bits = 0;
  e4m3() = default;
  COHORT_HD explicit e4m3(float value) {
    const uint32_t all = __builtin_bit_cast(uint32_t, value), magnitude = all & 0x7fffffffu;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t u;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(u) : "f"(0.0f), "f"(std::abs(value)));
#else
    uint32_t u = magnitude < 0x43e00000u ? magnitude : 0x43e00000u;  // 448
    if (u < 0x3c800000u)  // 2^-6: the last bit of the sum counts 2^-9, the step of subnormals
      u = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, u) + 0x1p14f) - 0x46800000u;
    else
      u = (u - (uint32_t{127 - 7} << 23) + 0x7ffffu + (u >> 20 & 1u)) >> 20;
#endif
    if (magnitude >= 0x7f800000u) u = 0x7f;
    bits = static_cast<uint8_t>((all >> 24 & 0x80u) | u);
  }
  COHORT_HD explicit operator float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x80) << 24, magnitude = bits & 0x7f;
    if (magnitude == 0x7f) return __builtin_bit_cast(float, 0x7fffffffu);  // the NaN of GPUs
    // Multiplication by 2^120 is exact and normalises subnormals.
    return __builtin_bit_cast(float, sign | magnitude << 20) * 0x1p120f;
  }
};

// A float type of at most 16 bits, whose arithmetic is that of f32.
template <class T>
inline constexpr bool is_narrow =
    std::is_same_v<T, bf16> || std::is_same_v<T, f16> || std::is_same_v<T, e4m3>;

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
template <>
inline constexpr DType dtype_of<f16> = DType::kF16;
template <>
inline constexpr DType dtype_of<e4m3> = DType::kE4M3;
template <>
inline constexpr DType dtype_of<int8_t> = DType::kI8;

constexpr size_t dtype_size(DType dtype) {
  constexpr size_t kSizes[] = {8, 4, 2, 4, 8, 1, 2, 1, 1};
  return kSizes[static_cast<int>(dtype)];
}

constexpr const char* dtype_name(DType dtype) {
  constexpr const char* kNames[] = {"f64", "f32", "bf16", "i32", "i64", "u8", "f16", "e4m3", "i8"};
  return kNames[static_cast<int>(dtype)];
}

// A type that ops compute in: not f16 and e4m3.
constexpr bool is_float(DType dtype) {
  return dtype == DType::kF64 || dtype == DType::kF32 || dtype == DType::kBF16;
}

constexpr bool is_integer(DType dtype) {
  return dtype == DType::kI32 || dtype == DType::kI64 || dtype == DType::kU8 || dtype == DType::kI8;
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
  if (dtype == DType::kF16) return fn.template operator()<f16>();
  if (dtype == DType::kE4M3) return fn.template operator()<e4m3>();
  if (dtype == DType::kI8) return fn.template operator()<int8_t>();
  return fn.template operator()<uint8_t>();
}

}  // namespace cohort
