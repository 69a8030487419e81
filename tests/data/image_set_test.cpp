// Labelled images: class folders and JSONL, with files that are not what they seem.
#include "data/image_set.h"

#include <sys/stat.h>

#include <filesystem>

#include "tests/support/png_file.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;
using test::png_of_color;

// 1 x 1, gray 7, as base64.
const std::string kUri =
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgBwAACQAIICPDjAAAAABJ"
    "RU5ErkJggg==";

class ImageSets : public testing::Test {
 protected:
  void add(const std::string& name, int red = 1) {
    fs::create_directories(fs::path(dir_.path(name)).parent_path());
    test::write_file(dir_.path(name), png_of_color(2, 3, red, 0, 0));
  }
  ImageSet lines(const std::string& text, std::vector<std::string> known = {}) {
    test::write_file(dir_.path("set.jsonl"), text);
    return ImageSet(dir_.path("set.jsonl"), "image", "label", std::move(known));
  }
  void expect_line_refused(const std::string& text, const std::string& message) {
    EXPECT_THROW_WITH(lines(text), InputError, message);
    EXPECT_THROW_WITH(lines(text), InputError, dir_.path("set.jsonl:1: "));
  }
  test::TempDir dir_;
};

TEST_F(ImageSets, ClassFoldersAreSortedAndHiddenFilesIgnored) {
  for (const char* name :
       {"set/b/2.png", "set/b/1.png", "set/a/deep/3.png", "set/a/.hidden", "set/.c/4.png"})
    add(name, name[6] - '0');
  test::write_file(dir_.path("set/README"), "text");
  const ImageSet set(dir_.path("set"));
  ASSERT_EQ(set.size(), 3);
  EXPECT_EQ(set.labels(), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(set.where(0), dir_.path("set/a/deep/3.png"));
  EXPECT_EQ(set.where(1), dir_.path("set/b/1.png"));
  EXPECT_EQ(set.label(0), 0);
  EXPECT_EQ(set.label(2), 1);
  EXPECT_EQ(set.load(1, 3).pixels[0], '1' - '0');
  EXPECT_EQ(set.load(2, 1).pixels.size(), 6u);
  EXPECT_EQ(set.check_all(3).size(), 0u);
  add("set/\xff/5.png", 5);  // a label must be text, as config.json has it
  EXPECT_THROW_WITH(ImageSet(dir_.path("set")), InputError,
                    "set/\xff: the name, a label, is not UTF-8; hint: ");
}

TEST_F(ImageSets, LinesNamePathsAndDataUris) {
  add("images/x.png", 5);
  const ImageSet set = lines("{\"image\": \"images/x.png\", \"label\": 10}\n\n{\"image\": \"" +
                             kUri + "\", \"label\": \"9\"}\n");
  ASSERT_EQ(set.size(), 2);
  EXPECT_EQ(set.labels(), (std::vector<std::string>{"10", "9"}));
  EXPECT_EQ(set.load(0, 3).pixels[0], 5);
  EXPECT_EQ(set.load(1, 3).pixels, (std::vector<uint8_t>{7, 7, 7}));
  EXPECT_EQ(set.where(1), dir_.path("set.jsonl:3"));
  test::write_file(
      dir_.path("other.jsonl"),
      "{\"i\": \"images/x.png\", \"l\": \"a\"}\n{\"i\": \"images/x.png\", \"l\": \"b\"}\n");
  EXPECT_EQ(ImageSet(dir_.path("other.jsonl"), "i", "l").label(1), 1);
}

TEST_F(ImageSets, NumbersAreLabelsAsTheyAreSpelled) {
  std::string text;
  for (const char* label : {"1.50", "-2", "1e3", "\"1.5\"", "12345678901234567890", "1.50"})
    text += "{\"image\": \"" + kUri + "\", \"label\": " + label + "}\n";
  const ImageSet set = lines(text);
  EXPECT_EQ(set.labels(),
            (std::vector<std::string>{"-2", "1.5", "1.50", "12345678901234567890", "1e3"}));
  EXPECT_EQ(set.label(5), 2);
}

TEST_F(ImageSets, KnownLabelsKeepTheirOrderAndOthersAreRefused) {
  const std::string text = "{\"image\": \"" + kUri + "\", \"label\": \"b\"}\n";
  const ImageSet set = lines(text, {"z", "b", "a"});
  EXPECT_EQ(set.labels(), (std::vector<std::string>{"z", "b", "a"}));
  EXPECT_EQ(set.label(0), 1);
  EXPECT_THROW_WITH(lines(text, {"z", "a"}), InputError, "set.jsonl:1: the label 'b' is not known");
}

TEST_F(ImageSets, RecordsWithoutAnImageOrLabelAreRefused) {
  expect_line_refused("{\"image\": \"" + kUri + "\"}", "the field 'label'");
  expect_line_refused("{\"label\": \"a\"}", "the field 'image'");
  expect_line_refused("{\"image\": {\"bytes\": \"\"}, \"label\": \"a\"}", "the field 'image'");
  expect_line_refused("{\"image\": \"" + kUri + "\", \"label\": [1.5]}",
                      "expected a text or a number as the field 'label'; hint: ");
  expect_line_refused("{\"image\": \"" + kUri + "\", \"label\": null}", "the field 'label'");
  expect_line_refused("{\"image\": \"none.png\", \"label\": \"a\"}", "cannot be opened");
  expect_line_refused("{\"image\"", "not valid JSON");
  EXPECT_THROW_WITH(lines("\n"), InputError, "holds no example");
}

TEST_F(ImageSets, PathsThatLeadOutOfTheFolderAreRefused) {
  add("set/a/1.png");
  add("set/b/1.png");
  add("outside/x.png");
  const std::string root = dir_.path("set/s.jsonl");
  for (const std::string& path : {std::string("../outside/x.png"), dir_.path("outside/x.png"),
                                  std::string("a/../../outside/x.png"), std::string("a/link.png"),
                                  std::string("far/x.png")}) {
    std::error_code exists;
    fs::create_symlink("../../outside/x.png", dir_.path("set/a/link.png"), exists);
    fs::create_directory_symlink("../outside", dir_.path("set/far"), exists);
    test::write_file(root, "{\"image\": \"" + path + "\", \"label\": \"a\"}");
    EXPECT_THROW_WITH(ImageSet{root}, InputError, "leads out of the folder");
    EXPECT_THROW_WITH(ImageSet{root}, InputError, root + ":1: ");
  }
  EXPECT_THROW_WITH(ImageSet(dir_.path("set")), InputError,
                    "set/a/link.png: leads out of the folder");
  // A link inside of the folder, and the folder itself by a link.
  fs::remove(dir_.path("set/a/link.png"));
  fs::remove(dir_.path("set/far"));
  fs::remove(root);
  fs::create_symlink("../b/1.png", dir_.path("set/a/link.png"));
  fs::create_directory_symlink("set", dir_.path("also"));
  EXPECT_EQ(ImageSet(dir_.path("also")).size(), 3);
}

TEST_F(ImageSets, OnlyRegularFilesAreRead) {
  ASSERT_EQ(::mkfifo(dir_.path("fifo").c_str(), 0600), 0);
  fs::create_directory(dir_.path("folder"));
  expect_line_refused("{\"image\": \"fifo\", \"label\": \"a\"}", "a FIFO");
  expect_line_refused("{\"image\": \"folder\", \"label\": \"a\"}", "is a folder");
  expect_line_refused("{\"image\": \"/dev/zero\", \"label\": \"a\"}", "leads out of the folder");
  EXPECT_THROW_WITH(ImageSet(dir_.path("fifo")), InputError, "a FIFO");
  EXPECT_THROW_WITH(ImageSet("/dev/zero"), InputError, "a character device");
  EXPECT_THROW_WITH(read_image(dir_.path("fifo"), 3), InputError, "a FIFO");
  // A FIFO in a class folder is no image, as in data.text.
  add("set/a/1.png");
  add("set/b/1.png");
  ASSERT_EQ(::mkfifo(dir_.path("set/a/fifo").c_str(), 0600), 0);
  EXPECT_EQ(ImageSet(dir_.path("set")).size(), 2);
  fs::resize_file(dir_.path("set/a/1.png"), (int64_t{1} << 30) + 1);
  EXPECT_THROW_WITH(read_image(dir_.path("set/a/1.png"), 3), InputError, "bytes; hint: ");
}

TEST_F(ImageSets, EmptyAndSingleClassesAreRefused) {
  fs::create_directories(dir_.path("set"));
  EXPECT_THROW_WITH(ImageSet(dir_.path("set")), InputError, "no class folders; hint: ");
  add("set/a/1.png");
  EXPECT_THROW_WITH(ImageSet(dir_.path("set")), InputError, "one label; hint: ");
  fs::create_directories(dir_.path("set/b"));
  EXPECT_THROW_WITH(ImageSet(dir_.path("set")), InputError,
                    "set/b: there is no file in this folder; hint: ");
  EXPECT_THROW_WITH(ImageSet(dir_.path("none")), InputError, "cannot be opened");
}

TEST_F(ImageSets, BadImagesAreCountedWithTheirPlaces) {
  add("set/a/1.png");
  add("set/b/1.png");
  test::write_file(dir_.path("set/a/2.png"), "GIF89a");
  test::write_file(dir_.path("set/b/2.png"), png_of_color(1, 1, 0, 0, 0).substr(0, 50));
  const std::vector<std::string> bad = ImageSet(dir_.path("set")).check_all(3);
  ASSERT_EQ(bad.size(), 2u);
  EXPECT_EQ(bad[0].find(dir_.path("set/a/2.png: is neither PNG nor JPEG")), 0u) << bad[0];
  EXPECT_EQ(bad[1].find(dir_.path("set/b/2.png: is a damaged or truncated PNG")), 0u) << bad[1];
  const ImageSet set = lines(
      "{\"image\": \"set/a/2.png\", \"label\": \"a\"}\n{\"image\": \"data:image/png,abc\", "
      "\"label\": \"b\"}\n{\"image\": \"data:image/png;base64,iV*=\", \"label\": "
      "\"b\"}\n{\"image\": \"data:\", \"label\": \"b\"}\n{\"image\": \"data:;base64,\", \"label\": "
      "\"b\"}\n");
  const std::vector<std::string> messages = set.check_all(3);
  ASSERT_EQ(messages.size(), 5u);
  for (size_t i = 0; i < 5; ++i)
    EXPECT_EQ(messages[i].find(dir_.path("set.jsonl:") + std::to_string(i + 1) + ": "), 0u)
        << messages[i];
  for (const size_t i : {1, 2})
    EXPECT_NE(messages[i].find("base64"), messages[i].npos) << messages[i];
}

TEST_F(ImageSets, FingerprintsAreOfNamesSizesAndLabels) {
  add("set/a/1.png");
  add("set/b/1.png");
  const std::string first = ImageSet(dir_.path("set")).fingerprint();
  EXPECT_EQ(first.size(), 16u);
  fs::rename(dir_.path("set"), dir_.path("moved"));
  EXPECT_EQ(ImageSet(dir_.path("moved")).fingerprint(), first);
  test::write_file(dir_.path("moved/a/1.png"), "longer or shorter");
  const std::string second = ImageSet(dir_.path("moved")).fingerprint();
  EXPECT_NE(second, first);
  fs::rename(dir_.path("moved/a"), dir_.path("moved/c"));
  EXPECT_NE(ImageSet(dir_.path("moved")).fingerprint(), second);
}

TEST_F(ImageSets, AChangedLineIsNoticed) {
  const std::string text = "{\"image\": \"" + kUri + "\", \"label\": \"a\"}\n{\"image\": \"" +
                           kUri + "\", \"label\": \"b\"}\n";
  const ImageSet set = lines(text);
  test::write_file(dir_.path("set.jsonl"), std::string(text.size(), ' '));
  EXPECT_THROW_WITH(set.load(0, 3), InputError, "has changed");
}

}  // namespace
}  // namespace cohort
