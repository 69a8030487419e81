// Images as bytes, decoded from PNG and JPEG files.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cohort {

// Row by row, channels interleaved; black unless the pixels are given.
struct Image {
  int64_t height = 0, width = 0, channels = 0;
  std::vector<uint8_t> pixels = std::vector<uint8_t>(offset(height, 0));
  size_t offset(int64_t y, int64_t x) const {
    return static_cast<size_t>((y * width + x) * channels);
  }
};

// The image in the bytes of a PNG or JPEG file, upright by its EXIF orientation, with `channels` 3
// (RGB) or 1 (gray), as Pillow converts it; alpha, gamma and the low byte of 16 bits are ignored
// (Pillow clips 16-bit gray at 255 instead).
// Throws InputError("WHERE: REASON; hint: ...") for another format, an animation, CMYK, more than
// 64 million pixels or 100 scans (before it allocates memory for them), and damaged or truncated
// files.
Image decode_image(std::string_view bytes, int64_t channels, const std::string& where);
// decode_image() of what read_input_file() reads, or of a data URI with base64 in place of a path.
// Throws InputError for another data URI.
Image read_image(const std::string& path, int64_t channels);

// ---- For the decoders of the formats, which return RGB and throw InputError("REASON") ----------

Image decode_png(std::string_view bytes);
Image decode_jpeg(std::string_view bytes);
// Throws InputError for more than 64 million pixels, and for more than `pixels_per_byte` pixels for
// each byte of the file, which no intact file has.
void check_pixels(int64_t height, int64_t width, int64_t pixels_per_byte, std::string_view bytes);
// An unsigned number of `size` bytes; 0 behind the end.
uint64_t number_at(std::string_view bytes, uint64_t at, size_t size,
                   std::endian order = std::endian::big);
// The orientation (1 to 8) in an EXIF block; 1 if it names none.
int exif_orientation(std::string_view exif);
// The upright image of one that is stored with an orientation.
Image upright(Image image, int orientation);

}  // namespace cohort
