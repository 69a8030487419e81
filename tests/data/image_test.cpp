// Decoding: Pillow's bytes, orientation, and files that are damaged, hostile or of another kind.
#include "data/image.h"

#include <cstring>
#include <filesystem>

#include "tests/data/image_fixture.h"
#include "tests/support/png_file.h"
#include "tests/support/sha256.h"

namespace cohort {
namespace {

using test::base64;
using test::big_endian;
using test::png_chunk;
using test::PngFile;

// 12 x 8 pixels, saved by Pillow.
const std::string kRgbJpeg = base64(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABALDA4MChAODQ4SERATGCgaGBYWGDEjJR0oOjM9PDkzODdASFxOQERXRT"
    "c4UG1RV19iZ2hnPk1xeXBkeFxlZ2P/2wBDARESEhgVGC8aGi9jQjhCY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2Nj"
    "Y2NjY2NjY2NjY2NjY2NjY2NjY2NjY2P/wAARCAAIAAwDAREAAhEBAxEB/8QAFAABAAAAAAAAAAAAAAAAAAAABf/EAB"
    "wQAAEEAwEAAAAAAAAAAAAAAAEAAgURAwQiEv/EABYBAQEBAAAAAAAAAAAAAAAAAAMEBf/EACIRAAAFAgcBAAAAAAAA"
    "AAAAAAABAwQRAjESQWFxobHR8P/aAAwDAQACEQMRAD8AM1YRoaORdKet0nSnlMb36j7QWr05uFccI3wOQhNwiRxJce"
    "GN9N6eEf/Z");
const std::string kGrayJpeg = base64(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABALDA4MChAODQ4SERATGCgaGBYWGDEjJR0oOjM9PDkzODdASFxOQERXRT"
    "c4UG1RV19iZ2hnPk1xeXBkeFxlZ2P/wAALCAAIAAwBAREA/8QAFQABAQAAAAAAAAAAAAAAAAAABQf/xAAZEAABBQAA"
    "AAAAAAAAAAAAAAAAAgQGNEL/2gAIAQEAAD8ACj2SiMqyT//Z");
const std::string kCmykJpeg = base64(
    "/9j/7gAOQWRvYmUAZAAAAAAA/9sAQwBQNzxGPDJQRkFGWlVQX3jIgnhubnj1r7mRyP////////////////////////"
    "///////////////////////////8AAFAgACAAMBEMRAE0RAFkRAEsRAP/EABcAAAMBAAAAAAAAAAAAAAAAAAACAwT/"
    "xAAiEAABAQYHAAAAAAAAAAAAAAAAEQECAxRh8CIxMkJxgeH/2gAOBEMATQBZAEsAAD8AjAFlqEMDIe1U5u+tpuc0hL"
    "UGSHkrrEr40D//2Q==");

std::vector<int> ints(const Image& image) {
  return {image.pixels.begin(), image.pixels.end()};
}

void expect_image_refused(const std::string& bytes, const std::string& reason) {
  EXPECT_THROW_WITH(decode_image(bytes, 3, "a.img"), InputError, reason);
  EXPECT_THROW_WITH(decode_image(bytes, 3, "a.img"), InputError, "a.img: ");
  EXPECT_THROW_WITH(decode_image(bytes, 3, "a.img"), InputError, "; hint: ");
}

TEST(Images, FilesHavePillowsBytes) {
  COHORT_REQUIRE_IMAGES(fixture);
  int decoded = 0;
  for (const Json& file : fixture.at("images").as_array()) {
    const std::string name = file.at("name").as_string();
    const std::string bytes = base64(file.at("file").as_string());
    if (name == "cmyk.jpg" || file.find("error") != nullptr) {
      expect_image_refused(bytes, name == "cmyk.jpg" ? "CMYK" : "truncated");
      continue;
    }
    const Image image = decode_image(bytes, 3, name);
    EXPECT_EQ(image.height, file.at("height").as_int()) << name;
    EXPECT_EQ(image.width, file.at("width").as_int()) << name;
    EXPECT_EQ(test::sha256(image.pixels.data(), image.pixels.size()),
              file.at("rgb_sha256").as_string())
        << name;
    ++decoded;
  }
  EXPECT_EQ(decoded, 16);
}

TEST(Images, EveryTypeOfPixelsIsRgb) {
  const std::vector<int> gray{0, 0, 0, 255, 255, 255};
  EXPECT_EQ(ints(decode_image(PngFile{1, 2}.bytes({"\1\2\3\4\5\6"}), 3, "")),
            (std::vector<int>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(ints(decode_image(PngFile{1, 2, 1, 0}.bytes({"\x40"}), 3, "")), gray);
  EXPECT_EQ(ints(decode_image(PngFile{1, 2, 2, 0}.bytes({"\x30"}), 3, "")), gray);
  const std::string wide("\0\xff\xff\0", 4);  // the high bytes count
  EXPECT_EQ(ints(decode_image(PngFile{1, 2, 16, 0}.bytes({wide}), 3, "")), gray);
  const std::string alpha("\0\7\xff\0", 4);
  EXPECT_EQ(ints(decode_image(PngFile{1, 2, 8, 4}.bytes({alpha}), 3, "")), gray);
  const std::string palette =
      png_chunk("PLTE", "\1\2\3\4\5\6") + png_chunk("tRNS", std::string(1, '\0'));
  EXPECT_EQ(ints(decode_image(PngFile{1, 2, 4, 3, palette}.bytes({"\x10"}), 3, "")),
            (std::vector<int>{4, 5, 6, 1, 2, 3}));
}

TEST(Images, GammaIsIgnoredAndInterlacedPixelsAreInOrder) {
  const std::string gamma = png_chunk("gAMA", big_endian(100000));
  EXPECT_EQ(ints(decode_image(PngFile{1, 1, 8, 2, gamma}.bytes({"\x10\x20\x30"}), 3, "")),
            (std::vector<int>{16, 32, 48}));
  // 2 x 2: passes 1, 6 and 7.
  EXPECT_EQ(ints(decode_image(PngFile{2, 2, 8, 0, "", 1}.bytes({"\1", "\2", "\3\4"}), 1, "")),
            (std::vector<int>{1, 2, 3, 4}));
}

TEST(Images, GrayIsPillowsLuma) {
  const std::string pixels("\xff\0\0\0\xff\0\0\0\xff\7\7\7", 12);
  EXPECT_EQ(ints(decode_image(PngFile{1, 4}.bytes({pixels}), 1, "")),
            (std::vector<int>{76, 150, 29, 7}));
  const Image gray = decode_image(kGrayJpeg, 1, ""), rgb = decode_image(kGrayJpeg, 3, "");
  ASSERT_EQ(gray.pixels.size(), 96u);
  for (size_t i = 0; i < 288; ++i) EXPECT_EQ(rgb.pixels[i], gray.pixels[i / 3]);
  // By Pillow.
  const std::vector<int> row = ints(decode_image(kRgbJpeg, 1, ""));
  EXPECT_EQ(std::vector<int>(row.begin(), row.begin() + 12),
            (std::vector<int>{5, 11, 18, 18, 28, 35, 44, 45, 53, 59, 66, 70}));
}

// A TIFF block with one entry, the orientation.
std::string exif(int orientation, bool little, int type = 3) {
  const auto number = [&](int value, size_t bytes) {
    std::string out = big_endian(static_cast<uint32_t>(value)).substr(4 - bytes);
    return little ? std::string(out.rbegin(), out.rend()) : out;
  };
  return (little ? "II" : "MM") + number(42, 2) + number(8, 4) + number(1, 2) + number(0x112, 2) +
         number(type, 2) + number(1, 4) + number(orientation, 2) + number(0, 2) + number(0, 4);
}

std::string with_exif(const std::string& jpeg, const std::string& tiff) {
  const std::string data = std::string("Exif\0\0", 6) + tiff;
  return jpeg.substr(0, 2) + "\xff\xe1" +
         big_endian(static_cast<uint32_t>(data.size() + 2)).substr(2) + data + jpeg.substr(2);
}

TEST(Images, AreUprightByTheirOrientation) {
  // The pixels a b c / d e f, as each orientation shows them.
  const std::vector<std::string> shown = {"abc/def",  "cba/fed",  "fed/cba",  "def/abc",
                                          "ad/be/cf", "da/eb/fc", "fc/eb/da", "cf/be/ad"};
  const Image jpeg = decode_image(kRgbJpeg, 3, "");
  for (int orientation = 0; orientation <= 9; ++orientation)
    for (const bool little : {false, true}) {
      const std::string block = exif(orientation, little);
      const std::string file = PngFile{2, 3, 8, 0, png_chunk("eXIf", block)}.bytes({"abc", "def"});
      const Image image = decode_image(file, 1, "");
      std::string text;
      for (int64_t y = 0; y < image.height; ++y)
        text += (y > 0 ? "/" : "") +
                std::string(reinterpret_cast<const char*>(&image.pixels[image.offset(y, 0)]),
                            static_cast<size_t>(image.width));
      EXPECT_EQ(
          text,
          shown[orientation >= 1 && orientation <= 8 ? static_cast<size_t>(orientation - 1) : 0]);
      EXPECT_EQ(decode_image(with_exif(kRgbJpeg, block), 3, "").pixels,
                upright(jpeg, orientation).pixels);
    }
}

TEST(Images, DamagedOrientationsAreIgnored) {
  const Image plain = decode_image(kRgbJpeg, 3, "");
  const std::string block = exif(6, true);
  for (size_t size = 0; size < 20; ++size)
    EXPECT_EQ(decode_image(with_exif(kRgbJpeg, block.substr(0, size)), 3, "").pixels, plain.pixels);
  std::string far = block, many = block, type = exif(6, true, 2);
  std::memset(&far[4], 0xff, 4);
  std::memset(&many[8], 0xff, 2);  // more entries than there are bytes; the first one counts
  EXPECT_EQ(decode_image(with_exif(kRgbJpeg, far), 3, "").pixels, plain.pixels);
  EXPECT_EQ(decode_image(with_exif(kRgbJpeg, type), 3, "").pixels, plain.pixels);
  EXPECT_EQ(decode_image(with_exif(kRgbJpeg, many), 3, "").width, 8);
  many[10] = 0;
  EXPECT_EQ(decode_image(with_exif(kRgbJpeg, many), 3, "").pixels, plain.pixels);
}

TEST(Images, TruncatedFilesAreRefusedWhereverTheyEnd) {
  const std::string png = PngFile{2, 3}.bytes({"abcdefghi", "jklmnopqr"});
  for (const std::string& file : {png, kRgbJpeg, kGrayJpeg})
    for (size_t size = 0; size < file.size(); ++size)
      EXPECT_THROW(decode_image(file.substr(0, size), 3, "a"), InputError) << size;
}

TEST(Images, BytesBehindThePixelsAreNoDamage) {
  std::string jpeg = kRgbJpeg;
  jpeg.insert(jpeg.size() - 2, "abc");  // libjpeg warns of them
  EXPECT_EQ(decode_image(jpeg, 3, "").pixels, decode_image(kRgbJpeg, 3, "").pixels);
  EXPECT_EQ(decode_image(kRgbJpeg + "abc", 3, "").pixels, decode_image(kRgbJpeg, 3, "").pixels);
  jpeg.resize(jpeg.size() - 2);
  expect_image_refused(jpeg, "truncated JPEG: it ends too soon");
}

TEST(Images, DamagedBytesNeverDoMoreThanFail) {
  testing::internal::CaptureStderr();
  const std::string png = PngFile{2, 3}.bytes({"abcdefghi", "jklmnopqr"});
  for (size_t at = 8; at < png.size(); ++at) {  // each is under a checksum, or is one
    std::string damaged = png;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x10);
    EXPECT_THROW(decode_image(damaged, 3, "a"), InputError) << at;
  }
  for (size_t at = 0; at < kRgbJpeg.size(); ++at)
    for (const int byte : {0x00, 0xff, 0x7f}) {
      std::string damaged = kRgbJpeg;
      damaged[at] = static_cast<char>(byte);
      try {
        decode_image(damaged, 3, "a");
      } catch (const InputError&) {
      }
    }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(Images, LargeSizesAreRefusedBeforeMemoryIsAllocated) {
  expect_image_refused(PngFile{8001, 8000}.bytes({"abc"}), "8000 x 8001 pixels");
  expect_image_refused(PngFile{8000, 8000}.bytes({"abc"}), "too few bytes");
  for (const uint32_t bad : {0u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
    EXPECT_THROW(decode_image(PngFile{bad, 1}.bytes({"abc"}), 3, "a"), InputError);
    EXPECT_THROW(decode_image(PngFile{1, bad}.bytes({"abc"}), 3, "a"), InputError);
  }
  std::string jpeg = kRgbJpeg;
  const size_t frame = jpeg.find("\xff\xc0") + 5;
  jpeg.replace(frame, 4, "\x7f\xff\x7f\xff");
  expect_image_refused(jpeg, "32767 x 32767 pixels");
  jpeg.replace(frame, 4, "\x1f\x40\x1f\x40");
  expect_image_refused(jpeg, "too few bytes");
}

// A file of few bytes may name a scan of all pixels again and again.
TEST(Images, ManyScansAreRefused) {
  namespace fs = std::filesystem;
  const fs::path tests = fs::path(__FILE__).parent_path().parent_path();
  const std::string file = test::read_file(tests / "fuzz/corpus/jpeg/progressive.jpg");
  const size_t first = file.find("\xff\xda"), end = file.find("\xff\xc4", first);
  const auto with = [&](int scans, const std::string& comment = "") {
    std::string more;
    for (int i = 10; i < scans; ++i) more += file.substr(first, end - first);
    if (!comment.empty())
      more = "\xff\xfe" + big_endian(static_cast<uint32_t>(comment.size() + 2)).substr(2) +
             comment + more;
    return file.substr(0, end) + more + file.substr(end);
  };
  const Image plain = decode_image(file, 3, "");
  EXPECT_EQ(decode_image(with(100), 3, "").pixels, plain.pixels);
  expect_image_refused(with(101), "a.img: has 101 scans, at most 100 are read");
  // Markers inside of a segment are none.
  std::string markers;
  for (int i = 0; i < 200; ++i) markers += "\xff\xda";
  EXPECT_EQ(decode_image(with(11, markers), 3, "").pixels, plain.pixels);
  expect_image_refused(with(101, "\xff\xd9"), "has 101 scans");
}

TEST(Images, OtherKindsAreRefusedByName) {
  expect_image_refused("", "neither PNG nor JPEG");
  expect_image_refused("GIF89a\f", "neither PNG nor JPEG");
  expect_image_refused("RIFF\1\1\1\1WEBPVP8 ", "neither PNG nor JPEG");
  expect_image_refused(kCmykJpeg, "CMYK");
  const auto animation = [](uint32_t frames) {
    return PngFile{1, 1, 8, 0, png_chunk("acTL", big_endian(frames) + big_endian(0))}.bytes({"a"});
  };
  expect_image_refused(animation(2), "animation of 2 frames");
  EXPECT_EQ(ints(decode_image(animation(1), 1, "")), std::vector<int>{'a'});
}

TEST(Images, TextChunksAreNotUnpacked) {
  std::string text("comment\0\0", 9);
  const std::string file =
      PngFile{1, 1, 8, 0, png_chunk("zTXt", text + "no zlib stream")}.bytes({"a"});
  EXPECT_EQ(ints(decode_image(file, 1, "")), std::vector<int>{'a'});
}

}  // namespace
}  // namespace cohort
