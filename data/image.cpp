// Formats by their first bytes, EXIF orientation, conversion to gray.
#include "data/image.h"

#include "core/check.h"
#include "sys/input_file.h"

namespace cohort {
namespace {

using namespace std::string_view_literals;

// Formats that are refused by name.
struct ForeignFormat {
  std::string_view name, magic;
  size_t at = 0;  // offset of the magic bytes
};
constexpr ForeignFormat kForeignFormats[] = {
    {"a GIF", "GIF8"sv},        {"a WebP", "WEBP"sv, 8}, {"an AVIF or HEIF", "ftyp"sv, 4},
    {"a TIFF", "II*\0"sv},      {"a TIFF", "MM\0*"sv},   {"a JPEG XL", "\xff\x0a"sv},
    {"a JPEG 2000", "jP"sv, 4}, {"a BMP", "BM"sv},
};

[[noreturn]] void refuse_format(std::string_view bytes) {
  if (bytes.empty()) throw InputError("is empty; hint: restore the file");
  for (const ForeignFormat& format : kForeignFormats)
    if (bytes.size() > format.at && bytes.substr(format.at).starts_with(format.magic))
      throw InputError(str("is ", format.name, " image, not PNG or JPEG; hint: convert it: ",
                           "python3 -c \"from PIL import Image; ",
                           "Image.open('FILE').convert('RGB').save('FILE.png')\""));
  throw InputError("is neither a PNG nor a JPEG image; hint: convert it to PNG or remove it");
}

// ITU-R 601 luma in 16 bits, as Pillow rounds it; gray stays as it is.
void convert_to_gray(Image& image) {
  const std::vector<uint8_t>& rgb = image.pixels;
  std::vector<uint8_t> gray(rgb.size() / 3);
  for (size_t i = 0; i < gray.size(); ++i)
    gray[i] = static_cast<uint8_t>(
        (19595 * rgb[3 * i] + 38470 * rgb[3 * i + 1] + 7471 * rgb[3 * i + 2] + 32768) >> 16);
  image.pixels = std::move(gray);
  image.channels = 1;
}

}  // namespace

Image decode_image(std::string_view bytes, int64_t channels, const std::string& where) {
  COHORT_CHECK(channels == 1 || channels == 3, "[image] expected 1 or 3 channels, got ", channels);
  try {
    const bool is_png = bytes.starts_with("\x89PNG\r\n\x1a\n"),
               is_jpeg = bytes.starts_with("\xff\xd8\xff");
    if (!is_png && !is_jpeg) refuse_format(bytes);
    Image image = is_png ? decode_png(bytes) : decode_jpeg(bytes);
    if (channels == 1) convert_to_gray(image);
    return image;
  } catch (const InputError& e) {
    throw InputError(str(where, ": ", e.what()));
  }
}

std::string read_image_file(const std::string& path) {
  constexpr int64_t kMaxBytes = 512 << 20;
  const InputFile file(path);
  if (file.size() > kMaxBytes)
    throw InputError(str(path, ": has ", file.size(), " bytes, an image at most ", kMaxBytes,
                         "; hint: check the path"));
  return file.read(0, file.size());
}

Image read_image(const std::string& path, int64_t channels) {
  return decode_image(read_image_file(path), channels, path);
}

Image decoded_image(int64_t height, int64_t width, int64_t pixels_per_byte,
                    std::string_view bytes) {
  if (height > kMaxPixels / width)
    throw InputError(str("has ", width, " x ", height, " pixels, and images may have ",
                         kMaxPixels / 1'000'000, " million; hint: scale it down"));
  if (height * width / pixels_per_byte > std::ssize(bytes))
    throw InputError(str("is truncated: ", bytes.size(), " bytes hold no ", width, " x ", height,
                         " pixels; hint: restore the file"));
  return image_of_size(height, width, 3);
}

int exif_orientation(std::string_view tiff) {
  constexpr uint64_t kOrientation = 0x112, kShort = 3, kEntry = 12;
  const bool little = tiff.starts_with("II*\0"sv);
  if (!little && !tiff.starts_with("MM\0*"sv)) return 1;
  // A number of `size` bytes; 0 behind the end.
  const auto number = [&](uint64_t at, uint64_t size) {
    uint64_t value = 0;
    for (uint64_t i = 0; i < size && at + size <= tiff.size(); ++i)
      value |= uint64_t{static_cast<uint8_t>(tiff[at + i])} << 8 * (little ? i : size - 1 - i);
    return value;
  };
  uint64_t entry = number(4, 4) + 2;
  for (uint64_t left = number(entry - 2, 2); left > 0; --left, entry += kEntry)
    if (number(entry, 2) == kOrientation && number(entry + 2, 2) == kShort)
      return static_cast<int>(number(entry + 8, 2));
  return 1;
}

Image upright(Image image, int orientation) {
  if (orientation < 2 || orientation > 8) return image;
  const bool transposed = orientation > 4;
  const bool mirror_x = orientation == 2 || orientation == 3 || orientation >= 7;
  const bool mirror_y =
      orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
  Image out = image_of_size(image.height, image.width, image.channels);
  if (transposed) std::swap(out.height, out.width);
  uint8_t* to = out.pixels.data();
  for (int64_t y = 0; y < out.height; ++y)
    for (int64_t x = 0; x < out.width; ++x) {
      int64_t from_y = transposed ? x : y, from_x = transposed ? y : x;
      if (mirror_x) from_x = image.width - 1 - from_x;
      if (mirror_y) from_y = image.height - 1 - from_y;
      to = std::copy_n(image.at(from_y, from_x), image.channels, to);
    }
  return out;
}

}  // namespace cohort
