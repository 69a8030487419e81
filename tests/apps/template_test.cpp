// `cohort template render`.
#include "tests/apps/process.h"

namespace cohort::test {
namespace {

class TemplateCommand : public testing::Test {
 protected:
  TemplateCommand() {
    write_file(dir_.path("context.json"), R"({"messages": [{"role": "user", "content": "Hi"}]})");
  }
  Output render(const std::string& path, std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {"template", "render", path, "--context", dir_.path("context.json")});
    return run_cohort(more);
  }
  TempDir dir_;
};

TEST_F(TemplateCommand, PrintsTheTextOfAFileAndNothingElse) {
  write_file(dir_.path("t.jinja"), "{{ messages[0].content }}, {{ strftime_now('%d %b %Y') }}\n");
  const Output output = render(dir_.path("t.jinja"), {"--now", "2025-07-10T12:00:00"});
  EXPECT_EQ(output.code, 0) << output.err;
  EXPECT_EQ(output.out, "Hi, 10 Jul 2025");
}

TEST_F(TemplateCommand, UsesTemplateAndSpecialTokensOfAFolder) {
  write_file(dir_.path("tokenizer_config.json"),
             R"({"bos_token": "<s>", "chat_template": "{{ bos_token }}{{ messages|length }}"})");
  EXPECT_EQ(render(dir_.path()).out, "<s>1");
  write_file(dir_.path("context.json"), R"({"messages": [], "bos_token": "<b>"})");
  EXPECT_EQ(render(dir_.path()).out, "<b>0");
}

TEST_F(TemplateCommand, FailsWithTheTemplatesMessageAndItsPosition) {
  write_file(dir_.path("t.jinja"), "a\n{{ raise_exception('roles must alternate') }}");
  expect_bad_input(render(dir_.path("t.jinja")), {"t.jinja:2:19: roles must alternate"});
  expect_bad_input(render(dir_.path("absent.jinja")), {"absent.jinja"});
  expect_bad_input(render(dir_.path()), {"no chat template; hint: "});
  expect_bad_input(render(dir_.path("t.jinja"), {"--now", "2025-02-30"}), {"--now", "not a time"});
  write_file(dir_.path("context.json"), "[]");
  expect_bad_input(render(dir_.path("t.jinja")), {"context.json: expected an object"});
}

}  // namespace
}  // namespace cohort::test
