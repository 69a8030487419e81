// Chat templates: the language in small cases, then real templates compared with Jinja2's output.
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/support/test_util.h"
#include "text/chat_template.h"

namespace cohort {
namespace {

std::tm july() {
  return {.tm_min = 5,
          .tm_hour = 14,
          .tm_mday = 10,
          .tm_mon = 6,
          .tm_year = 125,
          .tm_wday = 4,
          .tm_yday = 190};
}

std::string render(const std::string& source, const char* context = "{}",
                   const RenderLimits& limits = {}) {
  return ChatTemplate(source, "t")
      .render(parse_json(context, "context"), {.now = july(), .limits = limits})
      .text;
}

struct Case {
  const char *source, *expected;
};
// Expected texts are the output of Jinja2 3.1.6.
void expect_all(std::initializer_list<Case> cases) {
  for (const Case& c : cases) {
    SCOPED_TRACE(c.source);
    try {
      EXPECT_EQ(render(c.source), c.expected);
    } catch (const InputError& e) {
      ADD_FAILURE() << e.what();
    }
  }
}

TEST(Template, NumbersAreThoseOfPython) {
  expect_all(
      {{"{{ 7 / 2 }} {{ 4 / 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7.5 // -2 }}", "3.5 2.0 -4 2 -4.0"},
       {"{{ 1e16 }} {{ 1e15 }} {{ 0.0001 }} {{ 0.00001 }} {{ 0.1 + 0.2 }}",
        "1e+16 1000000000000000.0 0.0001 1e-05 0.30000000000000004"},
       {"{{ true + 1 }} {{ 1e3 }} {{ 1 == 1.0 }}", "2 1000.0 True"},
       {"{{ 2.5|round }} {{ 3.14159|round(2) }} {{ 2.1|round(0, 'ceil') }} {{ '42.9'|int }} "
        "{{ '12'.isdigit() }} {{ ''.isalpha() }} {{ 'Ab'.isupper() }}",
        "2.0 3.14 3.0 42 True False False"}});
}

TEST(Template, OperatorsBindAsInJinja) {
  expect_all({{"{{ 1 + [] | length }}{{ 'a' ~ 1 ~ 2 * 2 }}", "1a14"},
              {"{{ 1 < 2 < 3 }} {{ 3 > 2 > 2 }} {{ not 1 == 2 }}", "True False True"},
              {"{{ 'x' or 1 }} {{ '' or [] }} {{ 0 and 1 }} {{ 'a' and 'b' }}", "x [] 0 b"},
              {"{{ 'a' if false }}|{{ 1 if 0 else 2 if 0 else 3 }}", "|3"},
              {"{{ 'b' in 'abc' }} {{ 4 not in [1] }} {{ 'k' in {'k': 1} }}", "True True True"}});
}

TEST(Template, TextsAreSequencesOfCharacters) {
  expect_all(
      {{"{{ 'héß日'|length }} {{ 'héß日'[1:3] }} {{ 'héß日'[::-1] }} {{ '日本'[-1] }}",
        "4 éß 日ßéh 本"},
       {"{{ 'äöß'.upper() }} {{ 'ÄÖ'|lower }} {{ \"it's ON\".title() }} {{ \"it's ON\"|title }}",
        "ÄÖSS äö It'S On It's On"},
       {"{{ ' a b '.split() }} {{ 'a,b,,c'.split(',', 2) }} {{ ' a b  c '.split(None, 1) }}",
        "['a', 'b'] ['a', 'b', ',c'] ['a', 'b  c ']"},
       {"{{ 'aXbX'.replace('X', '-', 1) }} {{ 'abc'.find('c') }} {{ 'añb'.replace('', '-') }}",
        "a-bX 2 -a-ñ-b-"},
       {"{{ 'ab'.startswith(('x', 'a')) }} {{ 'a\\r\\nb\\n'.splitlines() }} {{ 'ññ'.rfind('ñ') }}",
        "True ['a', 'b'] 1"},
       {"{{ 'a\\n\\x41\\u00e9\\'' }}", "a\nAé'"}});
}

TEST(Template, ValuesPrintAsInPython) {
  expect_all({{"{{ [1, 'a', none, 2.0, true] }} {{ (1,) }} {{ {'k': \"it's\"} }}",
               "[1, 'a', None, 2.0, True] (1,) {'k': \"it's\"}"},
              {"{{ {'a': 1}.items() }} {{ undefined_name }}|", "dict_items([('a', 1)]) |"},
              {"{{ ['a\\n\\\\'] }}", "['a\\n\\\\']"}});
}

TEST(Template, JsonIsThatOfPython) {
  expect_all({{"{{ {'a': [1, 2.5, none, true, 'é\"\\n'], 1: {}} | tojson }}",
               "{\"a\": [1, 2.5, null, true, \"é\\\"\\n\"], \"1\": {}}"},
              {"{{ {'b': [1, {}], 'a': []} | tojson(indent=2, sort_keys=true) }}",
               "{\n  \"a\": [],\n  \"b\": [\n    1,\n    {}\n  ]\n}"},
              {"{{ [1, {'a': '<é🙂>'}] | tojson(ensure_ascii=true, separators=(',', ':')) }}",
               "[1,{\"a\":\"<\\u00e9\\ud83d\\ude42>\"}]"}});
  EXPECT_THROW_WITH(render("{{ [nothing] | tojson }}"), InputError, "'nothing' is undefined");
}

TEST(Template, FiltersTakeAttributesAndOtherFilters) {
  const char* context =
      R"({"m": [{"r": "u", "n": {"k": 2}}, {"r": "a"}, {"r": "u", "n": {"k": 1}}]})";
  EXPECT_EQ(render("{{ m|map(attribute='n.k', default='-')|join(',') }}", context), "2,-,1");
  EXPECT_EQ(render("{{ m|selectattr('r', 'equalto', 'u')|map(attribute='n')|list }}", context),
            "[{'k': 2}, {'k': 1}]");
  EXPECT_EQ(render("{{ m|selectattr('n', 'defined')|sort(attribute='n.k')|first }}", context),
            "{'r': 'u', 'n': {'k': 1}}");
  expect_all(
      {{"{{ ['b', 'A', 'c']|sort|join }} {{ {'b': 1, 'A': 2}|dictsort }}",
        "Abc [('A', 2), ('b', 1)]"},
       {"{{ [1, 2, 3]|select('odd')|list }} {{ ['a']|map('upper')|first }}", "[1, 3] A"},
       {"{{ 'a\n\nb'|indent }}|{{ 'a\n\nb'|indent(1, true, true) }}", "a\n\n    b| a\n \n b"},
       {"{{ x|default('d') }}{{ ''|default('e') }}{{ ''|default('f', true) }}", "df"},
       {"{{ '<a>'|e }} {{ '<' ~ '&amp;'|safe }} {{ '  t '|trim }}", "&lt;a&gt; <&amp; t"}});
}

TEST(Template, GeneratorsAreExhaustedByTheirFirstReader) {
  expect_all(
      {{"{% set g = [1, 2]|map('string') %}{{ g|join }}{{ g|join }}{{ 'true' if g }}", "12true"}});
  EXPECT_THROW_WITH(render("{{ [1]|map('string')|length }}"), InputError, "no length");
}

TEST(Template, TestsDistinguishTypes) {
  expect_all(
      {{"{{ 1 is integer }} {{ true is integer }} {{ true is number }} {{ 1.0 is float }}",
        "True False True True"},
       {"{{ 'a' is sequence }} {{ {} is mapping }} {{ none is none }} {{ x is defined }}",
        "True True True False"},
       {"{{ 'a' is string and 'a' is not mapping }} {{ 6 is divisibleby 3 }} {{ 'a' is in 'ab' }}",
        "True True True"},
       {"{{ {'items': 1}.items is callable }} {{ {'items': 1}['items'] }}", "True 1"}});
}

TEST(Template, LoopVariablesDescribeTheIteration) {
  expect_all(
      {{"{% for x in 'abc' %}{{ loop.index }}{{ x }}{{ loop.revindex0 }}{{ loop.previtem }}"
        "{{ loop.nextitem }}{{ ',' if not loop.last }}{% endfor %}",
        "1a2b,2b1ac,3c0b"},
       {"{% for k, v in {'a': 1, 'b': 2}.items() if v > 1 %}{{ k }}{{ loop.length }}{% endfor %}",
        "b1"},
       {"{% set n = namespace() %}{% for x in [1, 2, 3] if not n.end %}{{ x }}"
        "{% set n.end = x == 2 %}{% endfor %}",
        "12"},
       {"{% for x in [] %}x{% else %}none{% endfor %}", "none"},
       {"{% for x in range(9) %}{% if x == 1 %}{% continue %}{% endif %}{% if x == 3 %}{% break %}"
        "{% endif %}{{ x }}{{ loop.cycle('a', 'b') }}{% endfor %}",
        "0a2a"},
       {"{% for x in [1, 1, 2] %}{{ loop.changed(x) }}{% endfor %}", "TrueFalseTrue"}});
}

TEST(Template, NamesSetInALoopStayThereAndNamespacesDoNot) {
  expect_all({{"{% set a = 1 %}{% set n = namespace(a=1) %}{% for i in [5] %}{% set a = i %}"
               "{% set n.a = i %}{{ a }}{% endfor %}{{ a }}{{ n.a }}",
               "515"},
              {"{% if true %}{% set a = 1 %}{% endif %}{{ a }}", "1"},
              {"{% set a, b = 1, 2 %}{% set c %}{{ a }}-{{ b }}{% endset %}{{ c }}", "1-2"},
              {"{% filter upper %}a{{ 'b' }}{% endfilter %}", "AB"}});
}

TEST(Template, MacrosHaveDefaultsKeywordsAndCallers) {
  expect_all(
      {{"{% macro m(a, b='x', c=b) %}{{ a }}{{ b }}{{ c }}{% endmacro %}"
        "{{ m(1) }} {{ m(1, c=3) }} {{ m() }}",
        "1xx 1x3 xx"},
       {"{% macro m(a, b) %}{{ a }}{{ b }}{% endmacro %}{{ m(*[1, 2]) }}", "12"},
       {"{% macro m() %}<{{ caller(2) }}>{% endmacro %}{% call(x) m() %}{{ x }}{% endcall %}",
        "<2>"},
       {"{% macro f(n) %}{{ n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(3) }}", "3210"},
       {"{% macro m() %}{{ later }}{% endmacro %}{% set later = 1 %}{{ m() }}", "1"}});
  EXPECT_THROW_WITH(render("{% macro m() %}{% endmacro %}{{ m(1) }}"), InputError, "t:1:34: ");
}

TEST(Template, WhiteSpaceAroundTagsIsThatOfTransformers) {
  expect_all({{"a\n  {% if true %}\n  b\n  {% endif %}\nc\n", "a\n  b\nc"},
              {"a {%- if true -%} b {%- endif %} c", "ab c"},
              {"  {%+ if true %}b{% endif %}", "  b"},
              {"a\n {# c #}\nb {{- ' c' -}}\n d", "a\nb cd"},
              {"{% raw %}{{ x }}{% endraw %}\n{{ '}}' }}", "{{ x }}}}"},
              {"a\r\n{% if true %}\r\nb{% endif %}\r\n\r\n", "a\nb"}});
  const ChatTemplate plain(" {% if true %}\nb{% endif %}", "t",
                           {.trim_blocks = false, .lstrip_blocks = false});
  EXPECT_EQ(plain.render(Json(Json::Object{})).text, " \nb");
}

TEST(Template, FormatsTheGivenTime) {
  EXPECT_EQ(render("{{ strftime_now('%d %b %Y, %A %-I:%M %p, %j %%') }}"),
            "10 Jul 2025, Thursday 2:05 PM, 191 %");
}

TEST(Template, GenerationBlocksAreBytesOfTheText) {
  const ChatTemplate t(
      "é{% for m in ['a', 'bc'] %}[{% generation %}{{ m }}{% set x = 1 %}{% endgeneration %}]"
      "{% endfor %}{{ x }}",
      "t");
  const auto rendered = t.render(Json(Json::Object{}));
  EXPECT_EQ(rendered.text, "é[a][bc]");
  const std::vector<std::pair<size_t, size_t>> spans{{3, 4}, {6, 8}};
  EXPECT_EQ(rendered.generation_spans, spans);
  EXPECT_TRUE(t.has_generation_blocks());
  EXPECT_FALSE(ChatTemplate("a", "t").has_generation_blocks());
}

TEST(Template, ErrorsHaveLineAndColumn) {
  for (const auto& [source, message] : std::initializer_list<std::pair<const char*, const char*>>{
           {"a\n  {{ raise_exception('only ' ~ 1) }}", "t:2:21: only 1"},
           {"é {{ a.b }}", "t:1:7: 'a' is undefined"},
           {"{{ {}.b.c }}", "a dict has no attribute 'b'"},
           {"{{ 1 + 'a' }}", "t:1:6: '+' is not defined for int and str"},
           {"{% if x %}", "{% endif %} is missing"},
           {"{% endif %}", "t:1:4: unknown tag 'endif'"},
           {"{{ (1 }}", "t:1:7: "},
           {"{{ 'a }}", "t:1:4: unterminated string"},
           {"{{ 'a'.nothing() }}", "a str has no attribute 'nothing'"},
           {"{{ 1 is nothing }}", "t:1:9: there is no test 'nothing'"},
           {"{{ [1]|map('nothing')|list }}", "there is no filter or test 'nothing'"},
           {"{% for n in [] recursive %}{% endfor %}", "expected '%}', got 'recursive'"},
           {"{{ '%d' % 1 }}", "'%' is not defined for str and int"},
           {"{{ x | nothing }}", "t:1:8: there is no filter 'nothing'"},
           {"{% include 'x' %}", "cannot load others"},
           {"{{ [].append(1) }}", "a list has no attribute 'append'"},
           {"{{ 1 // 0 }}", "division by zero"},
           {"{% for a, b in [[1]] %}{% endfor %}", "expected 2 values, got 1"},
           {"{% break %}", "inside a {% for %} only"},
           {"{{ 9223372036854775807 + 1 }}", "overflows 64 bits"},
           {"{# a", "t:1:1: missing end of comment"},
           {"a\xff", "t:1:2: the template is not UTF-8"}})
    EXPECT_THROW_WITH(render(source), InputError, message);
  // An unknown filter is no error if it is not evaluated.
  EXPECT_EQ(render("{% if false %}{{ 1|nothing }}{% endif %}"), "");
  EXPECT_THROW_WITH(ChatTemplate("a", "t").render(Json(1)), InputError, "an object");
}

TEST(Template, HostileTemplatesMeetALimit) {
  const std::string many(100'000, '(');
  for (const std::string& source : std::vector<std::string>{
           "{{ " + many, "{{ " + std::string(100'000, '-') + "1 }}",
           "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
           "{{ 'x' * 999999999 }}", "{{ [0] * 999999999 }}", "{{ strftime_now('%9999d') }}",
           "{{ 'a\\nb'|indent(99999999) }}", "{{ range(999999999) }}",
           "{{ ('a' * 20000000).find('a' * 9999999 ~ 'b') }}",
           "{{ ('x' * 9999)|replace('', 'y' * 99999) }}",
           "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
           "{% set n = namespace(x=[]) %}{% for i in range(9999) %}{% set n.x = [n.x] %}{% endfor "
           "%}{{ n.x }}",
           "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}"
           "{% endfor %}{{ n.x }}",
           "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% "
           "endfor %}",
           "{% set n = namespace(x=[]) %}{% for i in range(999) %}{% set n.x = n.x + ['x' * "
           "9999999] %}"
           "{% endfor %}"})
    EXPECT_THROW(render(source), InputError) << source.substr(0, 60);
  std::string sum = "{{ 1";
  for (int i = 0; i < 50'000; ++i) sum += " + 1";
  EXPECT_EQ(render(sum + " }}"), "50001");
  EXPECT_THROW_WITH(render("{{ " + std::string(200, '[') + std::string(200, ']') + " }}"),
                    InputError, "t:1:78: nested deeper than 150");
  std::string list = "{{ [";
  for (int i = 0; i < 200'000; ++i) list += "1,";
  EXPECT_THROW_WITH(render(list + "] }}"), InputError, "200000 tokens");
  EXPECT_THROW_WITH(render("{{ 'abc' }}", "{}", {.text_bytes = 2}), InputError, "longer than 2");
}

TEST(Template, SelfReferencesArePrintedAndFreed) {
  expect_all({{"{% set n = namespace() %}{% set n.n = n %}{{ n }}", "<namespace>"},
              {"{% set n = namespace() %}{% for i in [1] %}{% set n.l = loop %}"
               "{% macro m() %}{{ n }}{% endmacro %}{% set n.m = m %}{% endfor %}{{ n.l.index }}",
               "1"}});
}

TEST(Template, FoldersHaveTemplatesAndSpecialTokens) {
  const test::TempDir dir;
  EXPECT_FALSE(find_chat_template(read_files(dir.path(), kChatTemplateFiles)));
  const auto configure = [&](const char* text) {
    test::write_file(dir.path("tokenizer_config.json"), text);
  };
  configure(R"({"bos_token": {"content": "<s>"}, "pad_token": null})");
  EXPECT_FALSE(find_chat_template(read_files(dir.path(), kChatTemplateFiles)));
  test::write_file(dir.path("special_tokens_map.json"),
                   R"({"bos_token": "x", "eos_token": "</s>"})");
  EXPECT_EQ(special_token_variables(read_files(dir.path(), kChatTemplateFiles)).dump(),
            R"({"bos_token":"<s>","eos_token":"</s>"})");
  configure(
      R"({"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]})");
  EXPECT_EQ(find_chat_template(read_files(dir.path(), kChatTemplateFiles)), "d");
  // As transformers, "tool_use" is for conversations with tools.
  configure(
      R"({"chat_template": [{"name": "default", "template": "{%- set x = 1 %}d{{ x }} \n  \n"},
                            {"name": "tool_use", "template": "\n t{{ tools }}  {%- if 1 %}\n!{% endif %}\n"}]})");
  const auto both = find_chat_template(read_files(dir.path(), kChatTemplateFiles));
  ASSERT_TRUE(both);
  EXPECT_EQ(render(*both), "d1 \n  ");
  EXPECT_EQ(render(*both, R"({"tools": null})"), "d1 \n  ");
  EXPECT_EQ(render(*both, R"({"tools": []})"), "\n t[]!");
  configure(R"({"chat_template": 5})");
  EXPECT_THROW_WITH(find_chat_template(read_files(dir.path(), kChatTemplateFiles)), InputError,
                    "neither a text nor a list");
  test::write_file(dir.path("chat_template.jinja"), "j");
  EXPECT_EQ(find_chat_template(read_files(dir.path(), kChatTemplateFiles)), "j");
}

// Cases of the data folder chat_templates/, which documents their origin.
class TemplateData : public testing::Test {
 protected:
  static Json read(const std::string& dir, const char* name) {
    const std::string path = dir + "/chat_templates/" + name;
    return parse_json(test::read_file(path), path);
  }
  static void expect_text(const std::string& name, const std::string& source, const Json& context,
                          const Json& expected, TemplateOptions options = {}) {
    SCOPED_TRACE(name);
    std::tm noon = july();
    noon.tm_hour = 12;
    noon.tm_min = 0;
    try {
      const auto text = ChatTemplate(source, name, options).render(context, {.now = noon}).text;
      EXPECT_TRUE(expected.is_string()) << "expected an error";
      if (expected.is_string()) {
        EXPECT_EQ(text, expected.as_string());
      }
    } catch (const InputError& e) {
      EXPECT_FALSE(expected.is_string()) << e.what();
    }
  }
};

TEST_F(TemplateData, Conversations) {
  COHORT_REQUIRE_DATA(dir);
  const Json data = read(dir, "chat_cases.json");
  EXPECT_GE(data.at("cases").as_array().size(), 45u);
  for (const Json& c : data.at("cases").as_array())
    expect_text(c.at("name").as_string(), c.at("template").as_string(), c.at("context"),
                c.at("expected"));
}

TEST_F(TemplateData, Syntax) {
  COHORT_REQUIRE_DATA(dir);
  const Json data = read(dir, "jinja_syntax.json");
  EXPECT_GE(data.as_array().size(), 131u);
  for (const Json& c : data.as_array())
    expect_text(c.at("name").as_string(), c.at("template").as_string(), c.at("context"),
                c.at("expected"),
                {.trim_blocks = c.at("options").at("trim_blocks").as_bool(),
                 .lstrip_blocks = c.at("options").at("lstrip_blocks").as_bool()});
}

TEST_F(TemplateData, RealTemplatesAsJinjaRendersThem) {
  COHORT_REQUIRE_DATA(dir);
  const Json data = read(dir, "jinja2_rendered.json");
  int renders = 0;
  for (const Json& t : data.at("templates").as_array()) {
    std::string source = t.at("template").as_string();
    if (t.at("template_file").as_string() == "tokenizer_config.json")
      source = parse_json(source, "template").at("chat_template").as_string();
    for (const auto& [name, variables] : data.at("contexts").as_object()) {
      Json context = variables;
      for (const char* token : {"bos_token", "eos_token"})
        if (const Json* text = t.find(token)) context.set(token, *text);
      const Json* expected = t.at("renders").at(name).find("ok");
      expect_text(t.at("template_file").as_string() + ", " + name, source, context,
                  expected != nullptr ? *expected : Json());
      ++renders;
    }
  }
  EXPECT_GE(renders, 41 * 8);
}

TEST(Template, WholeNumbersBeyond64BitsKeepTheirDigits) {
  const char* context = R"({"n": 18446744073709551617, "m": [-9223372036854775809]})";
  EXPECT_EQ(render("{{ n }} {{ m }} {{ m | tojson }}", context),
            "18446744073709551617 [-9223372036854775809] [-9223372036854775809]");
  EXPECT_EQ(render("{{ n is number }} {{ n is integer }} {{ n is string }} {{ n == n }}", context),
            "True True False True");
  EXPECT_THROW_WITH(render("{{ n + 1 }}", context), InputError, "is not defined for big int");
  EXPECT_THROW_WITH(render("{{ n | int }}", context), InputError, "overflows 64 bits");
}

}  // namespace
}  // namespace cohort
