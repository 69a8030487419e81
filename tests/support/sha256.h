// SHA-256 (FIPS 180-4), for results that are recorded as checksums.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>

namespace cohort::test {

inline std::string sha256(const void* data, size_t size) {
  // The first 32 bits behind the point of the roots of the primes.
  const auto fraction = [](long double root) {
    return static_cast<uint32_t>((root - std::floor(root)) * 0x1p32L);
  };
  std::array<uint32_t, 64> k{};
  std::array<uint32_t, 8> hash{};
  for (int prime = 2, n = 0; n < 64; ++prime) {
    bool is_prime = true;
    for (int d = 2; d * d <= prime; ++d) is_prime = is_prime && prime % d != 0;
    if (!is_prime) continue;
    if (n < 8) hash[static_cast<size_t>(n)] = fraction(std::sqrt(static_cast<long double>(prime)));
    k[static_cast<size_t>(n++)] = fraction(std::cbrt(static_cast<long double>(prime)));
  }
  std::string text(static_cast<const char*>(data), size);
  text += '\x80';
  while (text.size() % 64 != 56) text += '\0';
  for (int shift = 56; shift >= 0; shift -= 8)
    text += static_cast<char>(uint64_t{size} * 8 >> shift);
  for (size_t block = 0; block < text.size(); block += 64) {
    std::array<uint32_t, 64> w{};
    for (size_t i = 0; i < 64; ++i)
      w[i / 4] = w[i / 4] << 8 | static_cast<uint8_t>(text[block + i]);
    for (size_t i = 16; i < 64; ++i)
      w[i] = w[i - 16] + w[i - 7] +
             (std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ w[i - 15] >> 3) +
             (std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ w[i - 2] >> 10);
    auto [a, b, c, d, e, f, g, h] = hash;
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t t1 = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                          ((e & f) ^ (~e & g)) + k[i] + w[i];
      const uint32_t t2 =
          (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const std::array<uint32_t, 8> added{a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) hash[i] += added[i];
  }
  std::string out;
  for (const uint32_t word : hash) {
    char digits[9];
    std::snprintf(digits, sizeof digits, "%08x", word);
    out += digits;
  }
  return out;
}

}  // namespace cohort::test
