// `cohort template render`: renders a chat template.
#include <cstdio>

#include "apps/commands.h"
#include "core/check.h"
#include "sys/files.h"
#include "sys/input_file.h"
#include "text/chat_template.h"

namespace cohort::apps {
namespace {

// Parses "2025-07-10T12:00:00", or the date alone.
std::tm parse_time(const std::string& text) {
  std::tm t{};
  int end = 0;
  const int fields = std::sscanf(text.c_str(), "%4d-%2d-%2d%nT%2d:%2d:%2d%n", &t.tm_year, &t.tm_mon,
                                 &t.tm_mday, &end, &t.tm_hour, &t.tm_min, &t.tm_sec, &end);
  const std::tm given = t;
  t.tm_year -= 1900;
  t.tm_mon -= 1;
  t.tm_isdst = -1;
  const bool whole = (fields == 3 || fields == 6) && end == static_cast<int>(text.size());
  // timegm() sets the days of week and year, and normalises invalid dates.
  const bool valid = whole && timegm(&t) != -1 && t.tm_mday == given.tm_mday &&
                     t.tm_mon == given.tm_mon - 1 && t.tm_hour == given.tm_hour &&
                     t.tm_min == given.tm_min && t.tm_sec == given.tm_sec;
  if (!valid)
    throw InputError("--now: '" + text +
                     "' is not a time; hint: write it like 2025-07-10T12:00:00");
  return t;
}

}  // namespace

int render_template(const RenderTemplateOptions& options) {
  Json context = parse_json(read_input_file(options.context), options.context);
  if (!context.is_object())
    throw InputError(options.context + ": expected an object: the variables of the template");
  const bool is_folder = path_exists(options.path + "/.");
  NamedFiles files;
  if (is_folder)
    files = read_files(options.path, kChatTemplateFiles);
  else
    files.emplace_back(
        options.path.ends_with(".json") ? "tokenizer_config.json" : "chat_template.jinja",
        read_input_file(options.path));
  const auto source = find_chat_template(files);
  if (!source)
    throw InputError(options.path +
                     ": no chat template; hint: it must be in chat_template.jinja or in "
                     "tokenizer_config.json");
  const Json tokens = special_token_variables(files);
  for (const auto& [name, value] : tokens.as_object())
    if (is_folder && context.find(name) == nullptr) context.set(name, value);
  RenderOptions render;
  if (!options.now.empty()) render.now = parse_time(options.now);
  const std::string text = ChatTemplate(*source, options.path).render(context, render).text;
  print(stdout, text, options.raw);
  return kOk;
}

}  // namespace cohort::apps
