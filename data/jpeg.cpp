// JPEG by libjpeg-turbo.
#include <turbojpeg.h>

#include <memory>

#include "core/check.h"
#include "data/image.h"

namespace cohort {
namespace {

using namespace std::string_view_literals;

struct JpegHeader {
  int orientation = 1;
  bool ends = false;  // the end marker follows the pixels
};

// Reads the segments before the pixels.
JpegHeader read_header(std::string_view bytes) {
  JpegHeader header;
  size_t at = 2;
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  while (at + 4 <= bytes.size() && byte(at) == 0xff && byte(at + 1) != 0xda) {
    if (byte(at + 1) == 0xff) {  // fill
      ++at;
      continue;
    }
    const size_t size = size_t{byte(at + 2)} << 8 | byte(at + 3);
    const std::string_view segment = bytes.substr(at + 4, std::max<size_t>(size, 2) - 2);
    if (byte(at + 1) == 0xe1 && segment.starts_with("Exif\0\0"sv) && header.orientation == 1)
      header.orientation = exif_orientation(segment.substr(6));
    at += 2 + size;
  }
  header.ends = bytes.find("\xff\xd9", std::min(at, bytes.size())) != bytes.npos;
  return header;
}

}  // namespace

Image decode_jpeg(std::string_view bytes) {
  constexpr int64_t kMostPixelsPerByte = 512;  // a bit for each block of 64
  const std::unique_ptr<void, int (*)(tjhandle)> decoder(tjInitDecompress(), tjDestroy);
  COHORT_CHECK(decoder != nullptr, "[jpeg] expected memory for the decoder");
  const auto fail = [&](const std::string& reason) {
    throw InputError(
        str("is a damaged or truncated JPEG image: ", reason, "; hint: restore the file"));
  };
  const auto* data = reinterpret_cast<const unsigned char*>(bytes.data());
  int width = 0, height = 0, subsampling = 0, colors = 0;
  if (tjDecompressHeader3(decoder.get(), data, bytes.size(), &width, &height, &subsampling,
                          &colors) != 0)
    fail(tjGetErrorStr2(decoder.get()));
  if (colors == TJCS_CMYK || colors == TJCS_YCCK)
    throw InputError("has CMYK colors, which have no unique RGB; hint: convert it to RGB");
  Image image = decoded_image(height, width, kMostPixelsPerByte, bytes);
  const JpegHeader header = read_header(bytes);
  if (!header.ends) fail("it ends too soon");
  // The limit is 500 scans, each of which costs a pass over the image. Warnings other than of
  // missing data are common in files that all viewers show.
  const int result = tjDecompress2(decoder.get(), data, bytes.size(), image.pixels.data(), width, 0,
                                   height, TJPF_RGB, TJFLAG_ACCURATEDCT | TJFLAG_LIMITSCANS);
  const std::string reason = tjGetErrorStr2(decoder.get());
  if (result != 0 &&
      (tjGetErrorCode(decoder.get()) == TJERR_FATAL || reason.find("remature end") != reason.npos))
    fail(reason);
  return upright(std::move(image), header.orientation);
}

}  // namespace cohort
