// PNG by libpng. Its simplified interface is no choice: it applies gAMA and composes alpha.
#include <png.h>

#include <algorithm>
#include <cstdio>

#include "core/check.h"
#include "data/image.h"

namespace cohort {
namespace {

// All that has a destructor while libpng reads: it reports errors by longjmp, which runs none.
struct PngReader {
  explicit PngReader(std::string_view bytes);
  ~PngReader() { png_destroy_read_struct(&png, &info, nullptr); }
  PngReader(const PngReader&) = delete;
  PngReader& operator=(const PngReader&) = delete;

  const std::string_view bytes;
  std::string_view rest = bytes;  // not yet read
  char reason[128] = "";          // of a failure
  png_structp png = nullptr;
  png_infop info = nullptr;
  Image image;
  std::vector<png_bytep> rows;
  int orientation = 1;
};

[[noreturn]] void fail_in_png(png_structp png, png_const_charp reason) {
  auto& reader = *static_cast<PngReader*>(png_get_error_ptr(png));
  std::snprintf(reader.reason, sizeof reader.reason, "%s", reason);
  png_longjmp(png, 1);
}

void read_png_bytes(png_structp png, png_bytep out, size_t count) {
  std::string_view& rest = static_cast<PngReader*>(png_get_io_ptr(png))->rest;
  if (count > rest.size()) png_error(png, "it ends too soon");
  std::copy_n(rest.data(), count, out);
  rest.remove_prefix(count);
}

PngReader::PngReader(std::string_view bytes)
    : bytes(bytes),
      png(png_create_read_struct(PNG_LIBPNG_VER_STRING, this, fail_in_png,
                                 [](png_structp, png_const_charp) {})) {
  info = png == nullptr ? nullptr : png_create_info_struct(png);
  COHORT_CHECK(info != nullptr, "[png] expected memory for libpng's state");
}

// Returns false, with the reader's reason set, if libpng fails.
bool read_png(PngReader& r) {
  constexpr int64_t kMostPixelsPerByte = 8 * 1032;  // 1 bit each; deflate makes 1032 bytes of one
  if (setjmp(png_jmpbuf(r.png)) != 0) return false;
  png_set_read_fn(r.png, &r, read_png_bytes);
  png_set_crc_action(r.png, PNG_CRC_ERROR_QUIT, PNG_CRC_ERROR_QUIT);
  // Of the chunks that no pixel depends on, which may unpack to much, only the orientation's.
  png_set_keep_unknown_chunks(r.png, PNG_HANDLE_CHUNK_NEVER, nullptr, -1);
  png_set_keep_unknown_chunks(r.png, PNG_HANDLE_CHUNK_AS_DEFAULT,
                              reinterpret_cast<png_const_bytep>("eXIf"), 1);
  png_read_info(r.png, r.info);
  r.image = decoded_image(png_get_image_height(r.png, r.info), png_get_image_width(r.png, r.info),
                          kMostPixelsPerByte / std::max(1, 0 + png_get_bit_depth(r.png, r.info)),
                          r.bytes);
  png_set_expand(r.png);
  png_set_strip_16(r.png);
  png_set_strip_alpha(r.png);
  png_set_gray_to_rgb(r.png);
  png_set_interlace_handling(r.png);
  png_read_update_info(r.png, r.info);
  const size_t row = static_cast<size_t>(r.image.width) * 3;
  if (png_get_rowbytes(r.png, r.info) != row) png_error(r.png, "unknown type of pixels");
  for (size_t at = 0; at < r.image.pixels.size(); at += row) r.rows.push_back(&r.image.pixels[at]);
  png_read_image(r.png, r.rows.data());
  png_read_end(r.png, r.info);
  png_uint_32 size = 0;
  png_bytep exif = nullptr;
  if (png_get_eXIf_1(r.png, r.info, &size, &exif) != 0)
    r.orientation = exif_orientation({reinterpret_cast<const char*>(exif), size});
  return true;
}

// Frames of an animation, by the chunk acTL, which lies before the pixels; 1: it is none.
uint32_t frames_of(std::string_view bytes) {
  const auto number = [&](size_t at) {
    uint32_t value = 0;
    for (size_t i = at; i < at + 4; ++i) value = value << 8 | static_cast<uint8_t>(bytes[i]);
    return value;
  };
  for (size_t at = 8; at + 12 <= bytes.size() && bytes.substr(at + 4, 4) != "IDAT";
       at += size_t{12} + number(at))
    if (bytes.substr(at + 4, 4) == "acTL") return number(at + 8);
  return 1;
}

}  // namespace

Image decode_png(std::string_view bytes) {
  if (const uint32_t frames = frames_of(bytes); frames > 1)
    throw InputError(str("is an animation of ", frames, " frames; hint: save one of them as PNG"));
  PngReader reader(bytes);
  if (!read_png(reader))
    throw InputError(
        str("is a damaged or truncated PNG image: ", reader.reason, "; hint: restore the file"));
  return upright(std::move(reader.image), reader.orientation);
}

}  // namespace cohort
