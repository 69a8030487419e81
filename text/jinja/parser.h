// Compiles the source of a template.
#pragma once

#include "text/chat_template.h"
#include "text/jinja/interpreter.h"

namespace cohort::jinja {

// Fills in the other members from document.source. Throws TemplateError with its position.
void parse(Document& document, TemplateOptions options);

}  // namespace cohort::jinja
