// What the parser makes of a template: one tree of statements and expressions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/chat_template.h"
#include "data/template/value.h"

namespace cohort::jinja {

struct Native;

enum class Kind : uint8_t {
  // Expressions.
  kConst,        // value
  kName,         // name
  kField,        // name; kids: the namespace. A target of {% set %} only
  kTuple,        // kids
  kList,         // kids
  kDict,         // kids: key, value, key, value, ...
  kConditional,  // kids: then, condition, else
  kOr,           // kids: two
  kAnd,
  kNot,        // kids: one
  kCompare,    // kids: the first operand, then a kBinary for each comparison, with one kid
  kBinary,     // op; kids: two
  kSign,       // value (1 or -1); kids: one
  kAttribute,  // name; kids: the object
  kItem,       // kids: the object, the key
  kSlice,      // kids: the object, start, stop, step
  kCall,       // kids: the function, then arguments
  kFilter,     // name, native (nullptr: there is none); kids: the value, then arguments
  kTest,
  kKeyword,  // name; kids: the value. An argument, as is the next
  kSpread,   // kids: a list
  // Statements.
  kBody,         // kids: statements
  kText,         // name: what is printed
  kOutput,       // kids: one
  kIf,           // kids: condition, body, condition, body, ..., body of else (or an empty one)
  kFor,          // kids: target, iterable, condition (a kConst without value: none), body, else
  kSet,          // kids: target, value
  kSetBlock,     // kids: target, body, filters of kCaptured
  kFilterBlock,  // kids: a kConst, body, filters of kCaptured
  kMacro,        // name; kids: parameters (kName, with its default if it has one), body
  kCallBlock,    // kids: the call, a kMacro of its body
  kGeneration,   // kids: body
  kBreak,
  kContinue,
};

struct Node {
  Kind kind = Kind::kConst;
  bool mentions_loop = false;  // of kFor
  uint16_t height = 1;         // nodes on the longest way down
  uint32_t at = 0;             // byte of the source
  std::string_view name;
  Value value;
  const Native* native = nullptr;
  const Operator* op = nullptr;
  std::vector<Node> kids;
};

// In the filters of a block: the name of what the block has printed.
inline constexpr std::string_view kCaptured = "";

struct Document {
  std::string source;  // with \n for line breaks, and without one at the end
  Node body;           // refers to the source
  bool has_generation_blocks = false;
};

// Fills in the rest for a source. Throws Fault with its place.
void parse(Document& document, TemplateOptions options);

}  // namespace cohort::jinja
