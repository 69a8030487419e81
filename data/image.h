// Images as bytes, and the files that they are decoded from: PNG and JPEG.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cohort {

struct Image {
  int64_t height = 0, width = 0, channels = 0;
  std::vector<uint8_t> pixels;  // row by row, channels interleaved

  uint8_t* at(int64_t y, int64_t x) {
    return &pixels[static_cast<size_t>((y * width + x) * channels)];
  }
  const uint8_t* at(int64_t y, int64_t x) const {
    return &pixels[static_cast<size_t>((y * width + x) * channels)];
  }
};

// A black image.
inline Image image_of_size(int64_t height, int64_t width, int64_t channels) {
  const auto bytes = static_cast<size_t>(height * width * channels);
  return {height, width, channels, std::vector<uint8_t>(bytes)};
}

// Larger images are refused before memory is allocated for them.
inline constexpr int64_t kMaxPixels = 64'000'000;

// The image in the bytes of a PNG or JPEG file, upright by its EXIF orientation, with `channels` 3
// (RGB) or 1 (gray), as Pillow converts it; alpha, gamma and the low byte of 16 bits are ignored.
// Throws InputError("WHERE: REASON; hint: ...") for another format, an animation, CMYK, more than
// kMaxPixels, or a damaged or truncated file.
Image decode_image(std::string_view bytes, int64_t channels, const std::string& where);
// decode_image() of a file. Throws InputError as InputFile does too, and for more than 512 MiB.
Image read_image(const std::string& path, int64_t channels);
// The bytes that read_image() decodes.
std::string read_image_file(const std::string& path);

// ---- For the decoders of the formats, which return RGB -----------------------------------------

// These throw InputError without WHERE.
Image decode_png(std::string_view bytes);
Image decode_jpeg(std::string_view bytes);
// A black RGB image. Throws InputError for more than kMaxPixels, and if its file has less
// than 1 byte for `pixels_per_byte` of them, as no intact one does.
Image decoded_image(int64_t height, int64_t width, int64_t pixels_per_byte, std::string_view bytes);
// The orientation (1 to 8) that an EXIF block in TIFF format names; 1 if it names none.
int exif_orientation(std::string_view tiff);
// The upright image of one that is stored with this orientation.
Image upright(Image image, int orientation);

}  // namespace cohort
