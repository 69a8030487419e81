// Formats by their first bytes, EXIF orientation, conversion to gray.
#include "data/image.h"

#include <algorithm>

#include "core/check.h"
#include "sys/input_file.h"

namespace cohort {

using namespace std::string_view_literals;

namespace {

constexpr std::string_view kUriStart = "data:";

// Bytes of a data URI: "data:image/png;base64,iVBOR...".
std::string uri_bytes(std::string_view uri) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const size_t comma = std::min(uri.find(','), uri.size() - 1);
  std::string bytes;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : uri.substr(comma + 1, uri.find_last_not_of('=') - comma)) {
    const size_t digit = kDigits.find(c);
    if (digit == kDigits.npos || !uri.substr(0, comma).ends_with(";base64"))
      throw InputError("the data URI is not base64; hint: data:image/png;base64,iVBOR...");
    bits = bits << 6 | static_cast<uint32_t>(digit);
    count += 6;
    if (count < 8) continue;
    count -= 8;
    bytes += static_cast<char>(bits >> count);
  }
  return bytes;
}

}  // namespace

Image decode_image(std::string_view bytes, int64_t channels, const std::string& where) {
  COHORT_CHECK(channels == 1 || channels == 3, "[image] expected 1 or 3 channels, got ", channels);
  try {
    const bool is_png = bytes.starts_with("\x89PNG\r\n\x1a\n");
    if (!is_png && !bytes.starts_with("\xff\xd8\xff"))
      throw InputError("is neither PNG nor JPEG; GIF, WebP and other formats are not read");
    Image image = is_png ? decode_png(bytes) : decode_jpeg(bytes);
    if (channels == 3) return image;
    // ITU-R 601 luma, rounded as Pillow does; gray stays as it is.
    Image gray{image.height, image.width, 1};
    const uint8_t* rgb = image.pixels.data();
    for (uint8_t& y : gray.pixels) {
      y = static_cast<uint8_t>((19595 * rgb[0] + 38470 * rgb[1] + 7471 * rgb[2] + 32768) >> 16);
      rgb += 3;
    }
    return gray;
  } catch (const InputError& e) {
    throw InputError(str(where, ": ", e.what(), "; hint: restore the file, or save it as an RGB ",
                         "PNG or JPEG image of at most 64 million pixels"));
  }
}

Image read_image(const std::string& path, int64_t channels) {
  if (path.starts_with(kUriStart)) return decode_image(uri_bytes(path), channels, "the data URI");
  return decode_image(read_input_file(path), channels, path);
}

void check_pixels(int64_t height, int64_t width, int64_t pixels_per_byte, std::string_view bytes) {
  constexpr int64_t kMaxPixels = 64'000'000;
  const std::string size = str(width, " x ", height, " pixels");
  if (width == 0 || height == 0 || height > kMaxPixels / width) throw InputError("has " + size);
  if (height * width / pixels_per_byte > std::ssize(bytes))
    throw InputError("is truncated: it has too few bytes for its " + size);
}

uint64_t number_at(std::string_view bytes, uint64_t at, size_t size, std::endian order) {
  uint64_t number = 0;
  for (size_t i = 0; i < size && at + size <= bytes.size(); ++i) {
    const char byte = bytes[at + (order == std::endian::big ? i : size - 1 - i)];
    number = number << 8 | static_cast<uint8_t>(byte);
  }
  return number;
}

int exif_orientation(std::string_view exif) {
  constexpr uint64_t kOrientation = 0x112, kShort = 3, kEntryBytes = 12;
  const bool little = exif.starts_with("II*\0"sv);
  if (!little && !exif.starts_with("MM\0*"sv)) return 1;
  const auto number = [&](uint64_t at, size_t size) {
    return number_at(exif, at, size, little ? std::endian::little : std::endian::big);
  };
  uint64_t entry = number(4, 4) + 2;
  for (uint64_t left = number(entry - 2, 2); left > 0; --left, entry += kEntryBytes)
    if (number(entry, 2) == kOrientation && number(entry + 2, 2) == kShort)
      return static_cast<int>(number(entry + 8, 2));
  return 1;
}

Image upright(Image image, int orientation) {
  if (orientation < 2 || orientation > 8) return image;
  // Bit i: with orientation i, the image is stored transposed, from right to left, from below.
  const auto is_in = [&](int set) { return (set >> orientation & 1) != 0; };
  const bool transposed = is_in(0b111100000);
  const bool mirrored_x = is_in(0b110001100), mirrored_y = is_in(0b011011000);
  Image out{image.height, image.width, image.channels};
  if (transposed) std::swap(out.height, out.width);
  uint8_t* to = out.pixels.data();
  for (int64_t i = 0; i < out.height; ++i)
    for (int64_t j = 0; j < out.width; ++j) {
      const int64_t y = transposed ? j : i, x = transposed ? i : j;
      const size_t from =
          image.offset(mirrored_y ? image.height - 1 - y : y, mirrored_x ? image.width - 1 - x : x);
      to = std::copy_n(&image.pixels[from], image.channels, to);
    }
  return out;
}

}  // namespace cohort
