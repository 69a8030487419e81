// PNG by libpng. Its simplified interface is no choice: it applies gAMA and composes alpha.
#include <png.h>

#include <algorithm>
#include <cstdio>

#include "core/check.h"
#include "core/non_copyable.h"
#include "data/image.h"

namespace cohort {
namespace {

// All that has a destructor while libpng reads: it reports errors by longjmp, which runs none.
struct PngReader : NonCopyable {
  explicit PngReader(std::string_view bytes) : rest(bytes) {}
  ~PngReader() { png_destroy_read_struct(&png, &info, nullptr); }

  std::string_view rest;  // not yet read
  char failure[128] = "out of memory";
  Image image;
  uint64_t frames = 1;
  int orientation = 1;
  png_structp png = png_create_read_struct(PNG_LIBPNG_VER_STRING, this, fail, warn);
  png_infop info = png_create_info_struct(png);

  // Returns false, with the failure set, if libpng fails.
  bool read();
  [[noreturn]] static void fail(png_structp png, png_const_charp reason) {
    auto& reader = *static_cast<PngReader*>(png_get_error_ptr(png));
    std::snprintf(reader.failure, sizeof reader.failure, "%s", reason);
    png_longjmp(png, 1);
  }
  static void warn(png_structp, png_const_charp) {}
  static void read_bytes(png_structp png, png_bytep out, size_t count) {
    std::string_view& rest = static_cast<PngReader*>(png_get_io_ptr(png))->rest;
    if (count > rest.size()) png_error(png, "it ends too soon");
    std::copy_n(rest.data(), count, out);
    rest.remove_prefix(count);
  }
};

bool PngReader::read() {
  constexpr int64_t kMostBits = 8 * 1032;  // that deflate makes of a byte
  if (png == nullptr || info == nullptr || setjmp(png_jmpbuf(png)) != 0) return false;
  png_set_read_fn(png, this, read_bytes);
  png_set_crc_action(png, PNG_CRC_ERROR_QUIT, PNG_CRC_ERROR_QUIT);
  // Chunks that no pixel depends on are not unpacked. Two are kept as they are: the orientation's,
  // and the one that animations begin with.
  png_set_keep_unknown_chunks(png, PNG_HANDLE_CHUNK_NEVER, nullptr, -1);
  png_set_keep_unknown_chunks(png, PNG_HANDLE_CHUNK_ALWAYS,
                              reinterpret_cast<png_const_bytep>("eXIf\0acTL"), 2);
  png_read_info(png, info);
  check_pixels(png_get_image_height(png, info), png_get_image_width(png, info),
               kMostBits / png_get_bit_depth(png, info), rest);
  png_set_expand(png);
  png_set_strip_16(png);
  png_set_strip_alpha(png);
  png_set_gray_to_rgb(png);
  const int passes = png_set_interlace_handling(png);
  png_read_update_info(png, info);
  image = Image{png_get_image_height(png, info), png_get_image_width(png, info), 3};
  if (png_get_rowbytes(png, info) != image.offset(1, 0)) png_error(png, "unknown pixels");
  for (int64_t y = 0; y < passes * image.height; ++y)
    png_read_row(png, &image.pixels[image.offset(y % image.height, 0)], nullptr);
  png_read_end(png, info);
  png_unknown_chunkp chunk = nullptr;
  for (int left = png_get_unknown_chunks(png, info, &chunk); left > 0; --left, ++chunk) {
    const std::string_view data(reinterpret_cast<const char*>(chunk->data), chunk->size);
    if (chunk->name[0] == 'a') frames = number_at(data, 0, 4);
    if (chunk->name[0] == 'e') orientation = exif_orientation(data);
  }
  return true;
}

}  // namespace

Image decode_png(std::string_view bytes) {
  PngReader reader(bytes);
  if (!reader.read()) throw InputError(str("is a damaged or truncated PNG: ", reader.failure));
  if (reader.frames > 1) throw InputError(str("is an animation of ", reader.frames, " frames"));
  return upright(std::move(reader.image), reader.orientation);
}

}  // namespace cohort
