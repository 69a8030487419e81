// Parsing, printing, and errors for damaged or hostile JSON.
#include "text/json.h"

#include <bit>
#include <cmath>
#include <cstdlib>

#include "core/rng.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

Json parse(std::string_view text) {
  return parse_json(text, "file:7");
}

TEST(Json, KeepsKeyOrderAndEveryType) {
  const std::string text = R"({"z":1,"a":[true,null,-2.5,"x\ny"],"m":{"k":[]}})";
  const Json json = parse(text);
  EXPECT_EQ(json.dump(), text);
  EXPECT_EQ(json.at("z").as_int(), 1);
  EXPECT_TRUE(json.at("a").as_array()[0].as_bool());
  EXPECT_TRUE(json.at("a").as_array()[1].is_null());
  EXPECT_EQ(json.at("a").as_array()[2].as_double(), -2.5);
  EXPECT_EQ(json.at("a").as_array()[3].as_string(), "x\ny");
  EXPECT_EQ(json.dump(2).substr(0, 11), "{\n  \"z\": 1,");
}

TEST(Json, DoublesReadBackExactly) {
  Rng rng(1, rng_stream(kTestPurpose));
  int checked = 0;
  for (int i = 0; i < 20000; ++i) {
    const double value = std::bit_cast<double>(rng.bits());
    if (!std::isfinite(value)) continue;
    const Json back = parse(Json(value).dump());
    ASSERT_FALSE(back.is_int()) << value;
    ASSERT_EQ(std::bit_cast<uint64_t>(back.as_double()), std::bit_cast<uint64_t>(value));
    ++checked;
  }
  EXPECT_GT(checked, 15000);
}

TEST(Json, IntegersKeepAll64BitsAndLargerOnesTheirDigits) {
  EXPECT_EQ(parse("9223372036854775807").as_int(), INT64_MAX);
  EXPECT_EQ(parse("-9223372036854775808").as_int(), INT64_MIN);
  for (const char* text : {"9223372036854775808", "18446744073709551616", "-9223372036854775809",
                           "1000000000000000019884624838656"}) {
    const Json json = parse(text);
    EXPECT_FALSE(json.is_int());
    EXPECT_TRUE(json.is_number());
    EXPECT_EQ(json.as_double(), std::strtod(text, nullptr));
    EXPECT_EQ(json.dump(), text);
    EXPECT_EQ(parse(str("[", text, "]")).to_text(), text);
    EXPECT_THROW_WITH(json.as_int(), InputError,
                      str("expected a whole number, got ", text, ", which is beyond 64 bits"));
  }
  EXPECT_EQ(parse("9223372036854775808.0").dump(), "9.223372036854776e+18");
}

TEST(Json, NumbersInTextsKeepTheirSpelling) {
  for (const char* text : {"1.0", "1e5", "1E+5", "-0.50", "0.10", "3.14159265358979323846", "1e-7",
                           "12345678901234567890", "-123456789012345678901234567890",
                           "9007199254740993", "0", "1.50e3", "100000.0"}) {
    EXPECT_EQ(parse(text).to_text(), text);
    EXPECT_EQ(parse(str("[", text, ", [", text, "]]")).to_text(), str(text, ", ", text));
    const std::string object = str("{\"a\":[", text, ",{\"b\":", text, "}]}");
    EXPECT_EQ(parse(object).to_text(), object);
    EXPECT_EQ(parse(object).dump(Json::kAsRead), object);
    EXPECT_EQ(parse(text).as_double(), std::strtod(text, nullptr));
  }
  EXPECT_EQ(Json(0.1).to_text(), "0.1");  // it was not read
  EXPECT_EQ(Json(100000.0).dump(Json::kAsRead), "100000.0");
}

TEST(Json, AZeroByteEndsNothing) {
  using namespace std::string_view_literals;
  EXPECT_THROW_WITH(parse("{\"a\": 1}\0 {\"a\": 2}"sv), InputError,
                    "file:7: not valid JSON: a zero byte, at byte 9");
  EXPECT_THROW_WITH(parse("\0"sv), InputError, "a zero byte, at byte 1");
  EXPECT_THROW_WITH(parse("[1]\0"sv), InputError, "a zero byte, at byte 4");
  EXPECT_THROW_WITH(parse("\"a\0b\""sv), InputError, "a zero byte, at byte 3");
  EXPECT_EQ(parse("\"a\\u0000b\"").as_string(), "a\0b"sv);
}

TEST(Json, ErrorsOfFieldsNameFileAndPlace) {
  const Json json = parse(R"({"a": {"b": [1, "x"]}})"), other("x");
  const auto read = [&](const auto& get) { with_location(json, "f.json", get); };
  EXPECT_THROW_WITH(read([&] { json.at("a").at("b").as_array()[1].as_int(); }), InputError,
                    "f.json: a.b[1]: expected a whole number, got text");
  EXPECT_THROW_WITH(read([&] { json.at("a").at("c"); }), InputError, "f.json: a: missing key 'c'");
  EXPECT_THROW_WITH(read([&] { json.as_int(); }), InputError, "f.json: expected a whole number");
  EXPECT_THROW_WITH(read([&] { other.as_int(); }), InputError, "f.json: expected a whole number");
}

TEST(Json, IndentedTextHasALinePerItem) {
  EXPECT_EQ(parse(R"({"a": [1, {}], "b": [], "c": {"d": "\u00e9"}})").dump(2),
            "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": [],\n  \"c\": {\n    \"d\": "
            "\"\u00e9\"\n  }\n}");
}

TEST(Json, NonFiniteNumbersPrintAsNull) {
  EXPECT_EQ(Json(Json::Array{NAN, INFINITY, -INFINITY}).dump(), "[null,null,null]");
}

TEST(Json, InvalidUtf8PrintsAsReplacementCharacter) {
  EXPECT_EQ(Json("a\xff"
                 "b")
                .dump(),
            "\"a\xEF\xBF\xBD"
            "b\"");
  EXPECT_EQ(Json("\xc3").dump(), "\"\xEF\xBF\xBD\"");
}

TEST(Json, ErrorsNameFileReasonAndByte) {
  EXPECT_THROW_WITH(parse("{\"a\": 1,}"), InputError, "file:7: not valid JSON: ");
  EXPECT_THROW_WITH(parse("{\"a\": 1,}"), InputError, "at byte 9");
  EXPECT_THROW_WITH(parse(""), InputError, "unexpected end of input");
  EXPECT_THROW_WITH(parse("1 2"), InputError, "not valid JSON");
  EXPECT_THROW_WITH(parse("[1e999]"), InputError, "overflow");
  EXPECT_THROW_WITH(parse("\"\xff\""), InputError, "UTF-8");
  EXPECT_THROW_WITH(parse("{\"a\":1,\"b\":2,\"a\":3}"), InputError, "duplicate key 'a'");
}

TEST(Json, ErrorsQuoteLittleOfAHugeText) {
  try {
    parse("[\"" + std::string(1 << 20, 'x'));
    FAIL();
  } catch (const InputError& e) {
    EXPECT_LT(std::string(e.what()).size(), 400u);
  }
}

TEST(Json, NestingIsLimitedNotFatal) {
  const auto nested = [](size_t n) { return std::string(n, '[') + std::string(n, ']'); };
  EXPECT_EQ(parse(nested(256)).dump(), nested(256));
  EXPECT_THROW_WITH(parse(nested(257)), InputError, "deeper than 256");
  EXPECT_THROW_WITH(parse(std::string(10'000'000, '[')), InputError, "deeper than 256");
  std::string objects;
  for (int i = 0; i < 1000; ++i) objects += "{\"a\":";
  EXPECT_THROW_WITH(parse(objects), InputError, "deeper than 256");
}

TEST(Json, AccessorsNameTheTypeTheyFound) {
  EXPECT_THROW_WITH(Json("1").as_int(), InputError, "expected a whole number, got text");
  EXPECT_THROW_WITH(Json(1.5).as_int(), InputError, "got a number");
  EXPECT_THROW_WITH(Json(1).as_string(), InputError, "expected text, got a whole number");
  EXPECT_THROW_WITH(Json().as_object(), InputError, "got null");
  EXPECT_THROW_WITH(Json(true).as_array(), InputError, "got true or false");
  EXPECT_THROW_WITH(parse("{\"number\":1}").at("numbr"), InputError,
                    "missing key 'numbr'; did you mean 'number'?");
  EXPECT_THROW_WITH(parse("[1]").at("x"), InputError, "got a list");
  EXPECT_EQ(Json(3).as_double(), 3.0);
  EXPECT_EQ(Json(3).find("x"), nullptr);
}

TEST(Json, FindTextFindsTextsOnly) {
  const Json json = parse(R"({"a": "x", "b": 1, "c": ["x"]})");
  ASSERT_NE(json.find_text("a"), nullptr);
  EXPECT_EQ(*json.find_text("a"), "x");
  for (const char* key : {"b", "c", "d"}) EXPECT_EQ(json.find_text(key), nullptr) << key;
  EXPECT_EQ(Json("a").find_text("a"), nullptr);
}

TEST(Json, BuildsAndReplaces) {
  Json json;
  json.set("a", 1).set("b", "x").set("a", 2);
  EXPECT_EQ(json.dump(), R"({"a":2,"b":"x"})");
  Json list;
  list.push_back(1);
  list.push_back("two");
  EXPECT_EQ(list.dump(), R"([1,"two"])");
  EXPECT_THROW_WITH(Json(1).push_back(2), Error, "expected a list");
  EXPECT_THROW_WITH(Json(1).set("a", 2), Error, "expected an object");
}

TEST(Json, TemplatesPrintTextUnquotedAndListsWithCommas) {
  EXPECT_EQ(parse(R"(["", "a", 3, 0.5, [1, 2]])").to_text(), ", a, 3, 0.5, 1, 2");
  EXPECT_EQ(Json("a \"b\"").to_text(), "a \"b\"");
  EXPECT_EQ(parse(R"({"a": "b"})").to_text(), R"({"a":"b"})");
}

}  // namespace
}  // namespace cohort
