// JPEG by libjpeg-turbo.
#include <turbojpeg.h>

#include <algorithm>
#include <memory>

#include "core/check.h"
#include "data/image.h"

namespace cohort {

Image decode_jpeg(std::string_view bytes) {
  using namespace std::string_view_literals;
  constexpr int64_t kMostPixelsPerByte = 512;  // a bit for each block of 8 x 8
  const std::unique_ptr<void, int (*)(tjhandle)> owner(tjInitDecompress(), tjDestroy);
  const tjhandle jpeg = owner.get();
  const auto refuse = [&](const std::string& reason) {
    throw InputError(str("is a damaged or truncated JPEG: ", reason));
  };
  const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
  int width = 0, height = 0, sampling = 0, colors = 0;
  if (tjDecompressHeader3(jpeg, data, bytes.size(), &width, &height, &sampling, &colors) != 0)
    refuse(tjGetErrorStr2(jpeg));
  if (colors == TJCS_CMYK || colors == TJCS_YCCK) throw InputError("has CMYK colors");
  check_pixels(height, width, kMostPixelsPerByte, bytes);
  // Segments, each with a marker and a size; those of scans are followed by pixels, where 0xff
  // comes before 0 or a restart marker.
  int orientation = 1, scans = 0;
  size_t at = 2;
  for (uint64_t marker = 0; marker != 0xd9;) {
    if ((at = bytes.find('\xff', at)) == bytes.npos) refuse("it ends too soon");
    marker = number_at(bytes, ++at, 1);
    if (marker <= 1 || (marker | 7) == 0xd7 || marker == 0xff) continue;
    const uint64_t size = number_at(bytes, at + 1, 2);
    const std::string_view segment = bytes.substr(std::min(at + 3, bytes.size()), size);
    if (marker == 0xe1 && scans == 0 && segment.starts_with("Exif\0\0"sv))
      orientation = exif_orientation(segment.substr(6));
    scans += marker == 0xda;
    at += 1 + size;
  }
  // Each costs a pass over the image; cjpeg writes at most 100.
  if (scans > 100) throw InputError(str("has ", scans, " scans, at most 100 are read"));
  // Warnings are common in files that every program shows, except for those of missing data.
  Image image{height, width, 3};
  const bool done = tjDecompress2(jpeg, data, bytes.size(), image.pixels.data(), width, 0, height,
                                  TJPF_RGB, TJFLAG_ACCURATEDCT | TJFLAG_LIMITSCANS) == 0;
  const std::string reason = tjGetErrorStr2(jpeg);
  if (!done && (tjGetErrorCode(jpeg) == TJERR_FATAL || reason.find("remature end") != reason.npos))
    refuse(reason);
  return upright(std::move(image), orientation);
}

}  // namespace cohort
