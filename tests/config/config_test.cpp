// Configuration: accepted files, error messages, overrides, and round trips of dumps.
#include "config/visitor.h"

#include <filesystem>

#include "tests/support/test_util.h"

namespace cohort {
namespace {

enum class Color { kRed, kGreen };
constexpr EnumName<Color> kColors[] = {{Color::kRed, "red"}, {Color::kGreen, "green"}};

struct Inner {
  int64_t width = 3;
  std::string label = "x";
  void visit(ConfigVisitor& v) {
    v.field("width", width, "how wide", {.min = 1, .max = 64});
    v.field("label", label, "what to call it");
  }
  bool operator==(const Inner&) const = default;
};

// One field of every kind.
struct Everything {
  int64_t steps = 10;
  double rate = 0.1;
  std::optional<double> clip = 1.5;
  std::optional<int64_t> budget = 7;
  bool verbose = false;
  std::string name = "run";
  std::vector<std::string> words = {"a", "b"};
  std::vector<int64_t> sizes = {1, 2};
  Color color = Color::kRed;
  Inner inner;
  std::vector<Inner> parts;
  void visit(ConfigVisitor& v) {
    v.field("steps", steps, "number of steps", {.min = 0});
    v.field("rate", rate, "learning rate", {.min = 0, .max = 1});
    v.field("clip", clip, "clip above", {.min = 0});
    v.field("budget", budget, "how many", {.min = 1});
    v.field("verbose", verbose, "say more");
    v.field("name", name, "name of the run");
    v.field("words", words, "some words");
    v.field("sizes", sizes, "some sizes", {.min = 0});
    v.choice("color", color, kColors, "which color", "mauve");
    v.section("inner", inner, "a section");
    v.list("parts", parts, "sections in a list");
  }
  bool operator==(const Everything&) const = default;
};

Everything read(const std::string& text) {
  Everything config;
  read_config(config, parse_yaml(text, "run.yaml"));
  return config;
}

std::string read_error(const std::string& text) {
  try {
    read(text);
  } catch (const InputError& e) {
    return e.what();
  }
  return "no error";
}

}  // namespace

TEST(Config, ReadsEveryKindOfField) {
  const Everything c = read(
      "steps: 7\nrate: 3e-4\nclip: 2\nverbose: true\nname: hello world\nwords: [x, 'y z']\n"
      "sizes: [4, 5, 6]\ncolor: green\ninner:\n  width: 9\nparts:\n  - {width: 1}\n  - label: q\n");
  EXPECT_EQ(c.steps, 7);
  EXPECT_EQ(c.rate, 3e-4);
  EXPECT_EQ(c.clip, 2.0);
  EXPECT_TRUE(c.verbose);
  EXPECT_EQ(c.name, "hello world");
  EXPECT_EQ(c.words, (std::vector<std::string>{"x", "y z"}));
  EXPECT_EQ(c.sizes, (std::vector<int64_t>{4, 5, 6}));
  EXPECT_EQ(c.color, Color::kGreen);
  EXPECT_EQ(c.inner, (Inner{9, "x"}));
  EXPECT_EQ(c.parts, (std::vector<Inner>{{1, "x"}, {3, "q"}}));
}

TEST(Config, KeysThatAreAbsentKeepTheirDefaults) {
  EXPECT_EQ(read(""), Everything{});
  EXPECT_EQ(read("# only a comment\n"), Everything{});
  EXPECT_EQ(read("inner: {}\n"), Everything{});
  EXPECT_EQ(read("inner:\n"), Everything{});
}

TEST(Config, UnknownKeyNamesFileLineAndNearestKey) {
  EXPECT_EQ(read_error("steps: 1\nvebrose: true\n"),
            "run.yaml:2: unknown key 'vebrose'; did you mean 'verbose'?");
  EXPECT_EQ(read_error("inner:\n  label: a\n  widht: 2\n"),
            "run.yaml:3: unknown key 'inner.widht'; did you mean 'width'?");
  EXPECT_EQ(read_error("parts:\n  - width: 2\n  - lable: 2\n"),
            "run.yaml:3: unknown key 'parts[1].lable'; did you mean 'label'?");
  EXPECT_EQ(read_error("inner:\n  zzzzzz: 2\n"), "run.yaml:2: unknown key 'inner.zzzzzz'");
  EXPECT_EQ(read_error("steps: {many: 3}\n"), "run.yaml:1: unknown key 'steps.many'");
}

TEST(Config, AllUnknownKeysAreNamedAtOnceBeforeOtherErrors) {
  EXPECT_EQ(read_error("steps: many\nvebrose: true\ninner: {widht: 2}\nqqqq: {rrrr: {ssss: 1}}\n"),
            "3 unknown keys:\n"
            "  run.yaml:2: 'vebrose'; did you mean 'verbose'?\n"
            "  run.yaml:3: 'inner.widht'; did you mean 'width'?\n"
            "  run.yaml:4: 'qqqq.rrrr.ssss'");
}

TEST(Config, MessagesOfUnknownKeysAreBounded) {
  std::string yaml;
  for (int i = 0; i < 50000; ++i) yaml += str("zz", i, ": 1\n");
  const std::string error = read_error(yaml);
  EXPECT_TRUE(error.starts_with("50000 unknown keys:\n  run.yaml:1: 'zz0'"))
      << error.substr(0, 200);
  EXPECT_TRUE(error.ends_with("\n  and 49980 more")) << error;
  EXPECT_LT(error.size(), 2000u);
  EXPECT_LT(read_error("k" + std::string(900000, '\xc3') + ": 1\n").size(), 200u);
}

TEST(Config, WrongTypesReportTheExpectedType) {
  EXPECT_EQ(read_error("steps: many\n"), "run.yaml:1: steps: expected a whole number, got 'many'");
  EXPECT_EQ(read_error("steps: 1.5\n"), "run.yaml:1: steps: expected a whole number, got '1.5'");
  EXPECT_EQ(read_error("steps: '1'\n"),
            "run.yaml:1: steps: expected a whole number, got '1' in quotes");
  EXPECT_EQ(read_error("rate: \"1e-5\"\n"),
            "run.yaml:1: rate: expected a number, got '1e-5' in quotes");
  EXPECT_EQ(read_error("verbose: 'yes'\n"),
            "run.yaml:1: verbose: expected true, false, yes or no, got 'yes' in quotes");
  EXPECT_EQ(read_error("steps: 99999999999999999999\n"),
            "run.yaml:1: steps: expected a whole number, got '99999999999999999999'");
  EXPECT_EQ(read_error("steps:\n"), "run.yaml:1: steps: expected a whole number, got nothing");
  EXPECT_EQ(read_error("rate: fast\n"), "run.yaml:1: rate: expected a number, got 'fast'");
  EXPECT_EQ(read_error("rate: .nan\n"), "run.yaml:1: rate: expected a number, got '.nan'");
  EXPECT_EQ(read_error("rate: nan\n"), "run.yaml:1: rate: expected a number, got 'nan'");
  EXPECT_EQ(read_error("verbose: on\n"),
            "run.yaml:1: verbose: expected true, false, yes or no, got 'on'");
  EXPECT_EQ(read_error("name: [a]\n"), "run.yaml:1: name: expected text, got a list");
  EXPECT_EQ(read_error("words: [{a: 1}]\n"),
            "run.yaml:1: words: expected a text or a list of texts, got a map");
  EXPECT_EQ(read_error("sizes:\n  - 1\n  - two\n"),
            "run.yaml:3: sizes: expected a whole number, got 'two'");
  EXPECT_EQ(read_error("inner: 3\n"), "run.yaml:1: inner: expected a map of keys, got '3'");
  EXPECT_EQ(read_error("parts: {width: 1}\n"), "run.yaml:1: parts: expected a list, got a map");
  EXPECT_EQ(read_error("parts:\n  - {}\n  - width: x\n"),
            "run.yaml:3: parts[1].width: expected a whole number, got 'x'");
  EXPECT_EQ(read_error("inner: {width: 65}\n"),
            "run.yaml:1: inner.width: expected a number from 1 to 64, got '65'");
  EXPECT_EQ(read_error("parts: [1]\n"), "run.yaml:1: parts: expected a list of maps, got '1'");
}

TEST(Config, ANumberMayBeAuto) {
  EXPECT_EQ(read("budget: auto\n").budget, std::nullopt);
  EXPECT_EQ(read("budget: 12\n").budget, 12);
  EXPECT_EQ(read("").budget, 7);
  for (const char* bad : {"automatic", "'auto'", "1.5", "[auto]"})
    EXPECT_NE(
        read_error(str("budget: ", bad, "\n")).find("budget: expected a whole number or auto"),
        std::string::npos)
        << bad;
  EXPECT_EQ(read_error("budget:\n"),
            "run.yaml:1: budget: expected a whole number or auto, got nothing");
  EXPECT_EQ(read_error("budget: 0\n"), "run.yaml:1: budget: expected a number at least 1, got '0'");
  Everything config;
  config.budget.reset();
  EXPECT_NE(dump_config(config).find("budget: auto\n"), std::string::npos);
  EXPECT_EQ(read(dump_config(config)), config);
  EXPECT_NE(config_help(config).find("int or auto"), std::string::npos);
}

TEST(Config, UnknownChoiceListsAllAndNamesTheNearest) {
  EXPECT_EQ(read_error("color: gren\n"),
            "run.yaml:1: color: expected one of red, green, got 'gren'; did you mean 'green'?");
  EXPECT_EQ(read_error("color: blue\n"),
            "run.yaml:1: color: expected one of red, green, got 'blue'");
  EXPECT_EQ(read_error("color:\n"), "run.yaml:1: color: expected one of red, green, got nothing");
}

TEST(Config, ARemovedChoiceIsCalledSo) {
  EXPECT_EQ(read_error("color: mauve\n"),
            "run.yaml:1: color: expected one of red, green, got 'mauve', which was removed");
  EXPECT_EQ(read_error("color: ''\n"), "run.yaml:1: color: expected one of red, green, got ''");
  EXPECT_EQ(read_error("parts: [mauve]\n"),
            "run.yaml:1: parts: expected a list of maps, got 'mauve'");
}

TEST(Config, ValuesOutOfRangeNameTheRange) {
  EXPECT_EQ(read_error("steps: -1\n"), "run.yaml:1: steps: expected a number at least 0, got '-1'");
  EXPECT_EQ(read_error("rate: 1.5\n"),
            "run.yaml:1: rate: expected a number from 0 to 1, got '1.5'");
  EXPECT_EQ(read_error("sizes: [3, -3]\n"),
            "run.yaml:1: sizes: expected a number at least 0, got '-3'");
  EXPECT_EQ(read_error("clip: -2\n"), "run.yaml:1: clip: expected a number at least 0, got '-2'");
  EXPECT_EQ(read("rate: 1\n").rate, 1.0);  // bounds are inclusive
  EXPECT_EQ(read("inner: {width: 64}\n").inner.width, 64);
}

TEST(Config, DuplicateKeysNameBothLines) {
  EXPECT_EQ(read_error("steps: 1\nrate: 0.5\nsteps: 2\n"),
            "run.yaml:3: duplicate key 'steps', first given at line 1; hint: remove one of the "
            "two");
  EXPECT_NE(read_error("inner:\n  width: 1\n  width: 2\n").find("run.yaml:3: duplicate key"),
            std::string::npos);
}

TEST(Config, NullsClearOptionalsTextsAndLists) {
  for (const char* null : {"", " ~", " null", " Null", " NULL", " none"}) {
    const Everything c =
        read(str("clip:", null, "\nname:", null, "\nwords:", null, "\nparts:", null, "\n"));
    EXPECT_EQ(c.clip, std::nullopt) << null;
    EXPECT_EQ(c.name, "") << null;
    EXPECT_TRUE(c.words.empty()) << null;
    EXPECT_TRUE(c.parts.empty()) << null;
  }
  EXPECT_EQ(read("name: 'none'\n").name, "none");  // quoted: text
}

TEST(Config, BrokenFilesAreInputErrors) {
  EXPECT_THROW_WITH(parse_yaml("a: [1, 2\nb: 3\n", "bad.yaml"), InputError, "not valid YAML");
  EXPECT_THROW_WITH(parse_yaml("- 1\n- 2\n", "bad.yaml"), InputError,
                    "bad.yaml: expected keys and values at the top level, got a list");
  EXPECT_THROW_WITH(parse_yaml_file("/nonexistent/x.yaml"), InputError, "/nonexistent/x.yaml");
  EXPECT_THROW_WITH(parse_yaml("? [a, b]\n: 1\n", "bad.yaml"), InputError,
                    "a key must be plain text");
  EXPECT_THROW_WITH(parse_yaml("a: 1\n---\nb: 2\n", "bad.yaml"), InputError, "one document");
  const test::TempDir dir;
  EXPECT_THROW_WITH(parse_yaml_file(dir.path()), InputError, dir.path());
}

// Each of these crashed the process or exhausted its memory or time in some earlier version.
TEST(Config, HostileFilesAreInputErrors) {
  const auto expect_error = [](const std::string& text, const std::string& message) {
    SCOPED_TRACE(text.substr(0, 80));
    EXPECT_THROW_WITH(parse_yaml(text, "bad.yaml"), InputError, message);
  };
  expect_error("a: 1\nb: &b [*b]\n", "bad.yaml:2: anchors and aliases (&name, *name) are not");
  expect_error("&a {x: 1}\n", "bad.yaml:1: anchors and aliases");
  expect_error("a: &x 1\n", "bad.yaml:1: anchors and aliases");
  expect_error("a: &x\nb: 1\n", "bad.yaml:1: anchors and aliases");
  expect_error("&k a: 1\n", "bad.yaml:1: anchors and aliases");
  expect_error("a: *x\n", "bad.yaml:1:");  // an alias without an anchor
  expect_error("a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]\n", "bad.yaml:1: anchors and aliases");
  for (const char* text : {",", ",\na: 1\n", "a: 1\n...\n,\n", "]", "}", "a: 1\n]\n"})
    expect_error(text, "bad.yaml:");
  for (const char* open : {"[", "{a: ", "- ", "? "}) {
    std::string text = "a:\n  ";
    for (int i = 0; i < 100'000; ++i) text += open;
    expect_error(text, "bad.yaml:");
  }
  std::string deep = "a: 1";
  for (int i = 0; i < 63; ++i) deep = "{b: " + deep + "}";
  EXPECT_THROW_WITH(parse_yaml("c: {d: {" + deep + "}}", "bad.yaml"), InputError,
                    "bad.yaml:1: nested deeper than 64 levels");
  expect_error("a: " + std::string(1 << 20, 'x'), "expected at most 1048576 bytes");
}

TEST(Config, UnreadableFilesAreErrors) {
  const test::TempDir dir;
  test::write_file(dir.path("empty.yaml"), "");
  EXPECT_TRUE(parse_yaml_file(dir.path("empty.yaml")).entries.empty());
  EXPECT_THROW_WITH(parse_yaml_file(dir.path("none.yaml")), InputError,
                    "none.yaml': No such file or directory; hint: check the path");
  EXPECT_THROW_WITH(parse_yaml_file(dir.path()), InputError, "': Is a directory; hint");
  EXPECT_THROW_WITH(parse_yaml_file("/dev/zero"), InputError, "expected at most 1048576 bytes");
}

TEST(Config, ErrorsNameTheFile) {
  const test::TempDir dir;
  test::write_file(dir.path("a.yaml"), "steps: 1\nbogus: 2\n");
  Everything c;
  EXPECT_THROW_WITH(read_config(c, parse_yaml_file(dir.path("a.yaml"))), InputError,
                    dir.path("a.yaml") + ":2");
}

TEST(Config, OverridesReachIntoSectionsAndLists) {
  ConfigNode root = parse_yaml("steps: 1\nparts:\n  - width: 2\n  - width: 3\n", "run.yaml");
  for (const char* text : {"steps=5", "inner.width=8", "parts.1.label=\"a=b\"", "sizes=[7, 8]",
                           "rate=1e-3", "clip=", "words=[]"})
    apply_override(root, text);
  Everything c;
  read_config(c, root);
  EXPECT_EQ(c.steps, 5);
  EXPECT_EQ(c.inner.width, 8);
  EXPECT_EQ(c.parts, (std::vector<Inner>{{2, "x"}, {3, "a=b"}}));
  EXPECT_EQ(c.sizes, (std::vector<int64_t>{7, 8}));
  EXPECT_EQ(c.rate, 1e-3);
  EXPECT_EQ(c.clip, std::nullopt);
  EXPECT_TRUE(c.words.empty());
}

TEST(Config, OverridesFailNamingTheCommandLine) {
  const auto error_of = [](const std::string& text) -> std::string {
    ConfigNode root = parse_yaml("steps: 1\nparts:\n  - width: 2\n", "run.yaml");
    try {
      apply_override(root, text);
      Everything c;
      read_config(c, root);
    } catch (const InputError& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_EQ(error_of("steps"), "command line: expected key=value, got 'steps'");
  EXPECT_EQ(error_of("=3"), "command line: expected key=value, got '=3'");
  EXPECT_EQ(error_of("steps=x"), "command line: steps: expected a whole number, got 'x'");
  EXPECT_EQ(error_of("stps=3"), "command line: unknown key 'stps'; did you mean 'steps'?");
  EXPECT_EQ(error_of("inner.wdth=3"),
            "command line: unknown key 'inner.wdth'; did you mean 'width'?");
  EXPECT_EQ(error_of("parts.1.width=3"),
            "command line: parts.1.width: '1' is no index of a list with 1 items");
  EXPECT_EQ(error_of("sizes=[1, -2]"),
            "command line: sizes: expected a number at least 0, got '-2'");
  EXPECT_EQ(error_of("sizes=[1"),
            "command line: sizes: expected a list of whole numbers, got '[1'");
  EXPECT_EQ(error_of("steps=5 #6"), "command line: steps: expected a whole number, got '5 #6'");
  EXPECT_EQ(error_of("color=a: b"), "command line: color: expected one of red, green, got 'a: b'");
  EXPECT_EQ(error_of("inner=*x"), "command line: inner: expected a map of keys, got '*x'");
  EXPECT_LT(error_of(std::string(100000, '\x80') + "=1").size(), 200u);  // not UTF-8
  std::string nested;
  for (int i = 0; i < 10000; ++i) nested += "key.";
  EXPECT_LT(error_of(nested + "key=1").size(), 200u);
}

TEST(Config, OverridesOfTextKeysAreVerbatim) {
  const auto read_name = [](const std::string& value) {
    ConfigNode root = parse_yaml("words: [a]\n", "run.yaml");
    apply_override(root, "name=" + value);
    apply_override(root, "words.0=" + value);
    Everything c;
    read_config(c, root);
    EXPECT_EQ(c.words, std::vector<std::string>{c.name}) << value;
    EXPECT_EQ(root.find("name")->text(), c.name) << value;
    return c.name;
  };
  for (const char* text :
       {"dir #1",      "a: b.txt",    "[a]",     "{a}",        "[a",      "{a: b",    "it's",
        "\"a\" and b", "\"a\" #b\"",  "'a' 'b'", "a 'b'",      "#x",      "*ref",     "&ref x",
        "!tag",        "- item",      "a: b: c", "日本 é.txt", "%x",      " pad ",    "a\nb: c",
        ",",           "\\d+: \"x\"", "a=b",     "0x10",       "1e3",     "true",     "C:\\x",
        "'",           "\"",          "? x",     "--- y",      "{{ x }}", "x: [1, 2]"})
    EXPECT_EQ(read_name(text), text);
  EXPECT_EQ(read_name("\"dir #1\""), "dir #1");
  EXPECT_EQ(read_name("'it''s'"), "it's");
  EXPECT_EQ(read_name("\"a \\\"b\\\"\""), "a \"b\"");
  EXPECT_EQ(read_name("'none'"), "none");
}

TEST(Config, OverridesCanClearATextKey) {
  for (const char* value : {"", "\"\"", "''", "null", "none", "~"}) {
    ConfigNode root = parse_yaml("name: x\n", "run.yaml");
    apply_override(root, str("name=", value));
    Everything c;
    read_config(c, root);
    EXPECT_EQ(c.name, "") << value;
    EXPECT_EQ(root.find("name")->text(), "") << value;
  }
}

TEST(Config, OverridesOfMapsAndListsOfMapsAreYaml) {
  ConfigNode root = parse_yaml("steps: 1\n", "run.yaml");
  for (const char* text : {"inner={width: 8, label: 'a #b'}", "parts=[{width: 2}, {label: q}]",
                           "parts.1.label=r: s", "words=['a: b', c]"})
    apply_override(root, text);
  Everything c;
  read_config(c, root);
  EXPECT_EQ(c.inner, (Inner{8, "a #b"}));
  EXPECT_EQ(c.parts, (std::vector<Inner>{{2, "x"}, {3, "r: s"}}));
  EXPECT_EQ(c.words, (std::vector<std::string>{"a: b", "c"}));
}

TEST(Config, IgnoredKeysBelongToAnotherReader) {
  const std::vector<std::string> ignored = {"task"};
  Everything c;
  read_config(c, parse_yaml("steps: 4\ntask: {any: thing}\n", "run.yaml"), ignored);
  EXPECT_EQ(c.steps, 4);
  // Only at the top level.
  EXPECT_THROW_WITH(read_config(c, parse_yaml("inner: {task: 1}\n", "run.yaml"), ignored),
                    InputError, "inner.task");
}

// Text that YAML would parse as a number, a boolean, null, a map or a comment.
const char* const kAwkwardTexts[] = {
    "1e3",  "true", "false", "True", "a: b", "",      "line\nbreak", "\"quoted\"", "it's",
    "\\n",  "null", "Null",  "NULL", "~",    "none",  "- item",      "-5",         "#note",
    "a #b", "[a]",  "{a}",   "*ref", "&ref", "!tag",  "%x",          "@x",         " pad ",
    "\t",   "0x10", ".inf",  ".nan", "nan",  "1_000", "2024-01-01",  "yes",        "on",
    "a,b",  "|",    ">",     "?",    ":",    "---",   "...",         "=",          "<<",
    "\x7f", "é",    "日本",  "\x01", "a\rb", "C:\\x", "/tmp/x.yaml", "ends:",      "{{ x }}"};

TEST(Config, DumpReadsBackAsItself) {
  Everything c;
  c.steps = -0;
  c.rate = 0.1 + 0.2;  // needs all 17 digits
  c.clip = std::nullopt;
  c.budget = 123456789012;
  c.verbose = true;
  c.words.clear();
  c.sizes.clear();
  c.color = Color::kGreen;
  c.inner = {64, "deep"};
  c.parts = {{1, "p"}, {2, "q: r"}, {3, ""}};
  EXPECT_EQ(read(dump_config(c)), c) << dump_config(c);
  EXPECT_EQ(read(dump_config(Everything{})), Everything{});
  c.steps = std::numeric_limits<int64_t>::max();
  c.sizes = {0, std::numeric_limits<int64_t>::max()};
  c.clip = 5e-324;
  EXPECT_EQ(read(dump_config(c)), c) << dump_config(c);
}

TEST(Config, DumpedTextsReadBackForAnyContent) {
  Everything all;
  for (const char* text : kAwkwardTexts) {
    Everything c;
    c.name = text;
    c.words = {text, "plain"};
    c.inner.label = text;
    c.parts = {{1, text}, {2, text}};
    EXPECT_EQ(read(dump_config(c)), c) << dump_config(c);
    all.words.push_back(text);
  }
  EXPECT_EQ(read(dump_config(all)), all);
}

TEST(Config, FieldsHaveTheNamesOfOverrides) {
  Everything c;
  c.parts = {{1, "p"}, {2, "q: r"}};
  const ConfigFields fields = config_fields(c);
  const auto value_of = [&](const std::string& key) {
    for (const auto& [name, value] : fields)
      if (name == key) return value;
    return std::string("missing");
  };
  EXPECT_EQ(fields.front(), std::pair(std::string("steps"), std::string("10")));
  EXPECT_EQ(value_of("words"), "[a, b]");
  EXPECT_EQ(value_of("inner.width"), str(c.inner.width));
  EXPECT_EQ(value_of("parts.1.label"), "\"q: r\"");
  EXPECT_EQ(config_fields(Everything{}).size() + 4, fields.size());
}

TEST(Config, HelpMentionsEveryKeyWithDefaultAndRange) {
  const std::string help = config_help<Everything>();
  for (const char* key : {"steps", "rate", "clip", "verbose", "name", "words", "sizes", "color",
                          "inner:", "  width", "  label", "parts:"})
    EXPECT_NE(help.find(key), std::string::npos) << key << "\n" << help;
  for (const char* text : {"number of steps (int, at least 0; default 10)", "from 0 to 1",
                           "red | green; default red", "(a list of)", "from 1 to 64; default 3"})
    EXPECT_NE(help.find(text), std::string::npos) << text << "\n" << help;
}

}  // namespace cohort
