// From the source of a template to its code.
#pragma once

#include "data/chat_template.h"
#include "data/template/interpreter.h"

namespace cohort::jinja {

// Fills in the rest for a source. Throws Fault with its place.
void parse(Document& document, TemplateOptions options);

}  // namespace cohort::jinja
