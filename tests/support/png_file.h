// PNG files for tests, in stored blocks: no compressor is needed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::test {

inline std::string big_endian(uint32_t value) {
  std::string out;
  for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>(value >> shift);
  return out;
}

inline uint32_t crc32(std::string_view bytes) {
  uint32_t crc = ~0u;
  for (const char c : bytes) {
    crc ^= static_cast<uint8_t>(c);
    for (int i = 0; i < 8; ++i) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0xEDB88320u : 0);
  }
  return ~crc;
}

inline std::string png_chunk(const std::string& type, const std::string& data) {
  return big_endian(static_cast<uint32_t>(data.size())) + type + data +
         big_endian(crc32(type + data));
}

// A zlib stream of at most 65,535 bytes.
inline std::string stored_zlib(const std::string& data) {
  uint32_t a = 1, b = 0;
  for (const char c : data) b = (b + (a = (a + static_cast<uint8_t>(c)) % 65521)) % 65521;
  const auto size = static_cast<uint16_t>(data.size());
  std::string out = "\x78\x01\x01";
  for (const uint16_t number : {size, static_cast<uint16_t>(~size)})
    out += {static_cast<char>(number), static_cast<char>(number >> 8)};
  return out + data + big_endian(b << 16 | a);
}

struct PngFile {
  uint32_t height, width;
  int depth = 8, color = 2;  // 0: gray, 2: RGB, 3: palette, 4: gray and alpha, 6: RGBA
  std::string chunks = "";   // between IHDR and IDAT
  int interlaced = 0;

  // `lines`: of all passes, each without its filter byte.
  std::string bytes(const std::vector<std::string>& lines) const {
    std::string data;
    for (const std::string& line : lines) data += '\0' + line;
    const std::string header = big_endian(width) + big_endian(height) + static_cast<char>(depth) +
                               static_cast<char>(color) + std::string(2, '\0') +
                               static_cast<char>(interlaced);
    return "\x89PNG\r\n\x1a\n" + png_chunk("IHDR", header) + chunks +
           png_chunk("IDAT", stored_zlib(data)) + png_chunk("IEND", "");
  }
};

// An image of one color.
inline std::string png_of_color(uint32_t height, uint32_t width, int red, int green, int blue) {
  std::string line;
  for (uint32_t x = 0; x < width; ++x)
    for (const int byte : {red, green, blue}) line += static_cast<char>(byte);
  return PngFile{height, width}.bytes(std::vector<std::string>(height, line));
}

}  // namespace cohort::test
