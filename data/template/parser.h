// What the parser makes of a template: one tree of statements and expressions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/chat_template.h"
#include "data/template/value.h"

namespace cohort::jinja {

enum class Kind : uint8_t {
  kConst,  // value
  kName,   // name
  kTuple,  // kids
  kList,   // kids
  kDict,   // kids: key, value, key, value, ...
  kIf,     // kids: condition, value, condition, value, ..., value of else
  kNot,    // kids: one
  kChain,  // op, as the last kid; kids: the first operand, then kOperand for operators of one level
  kOperand,    // op, which stands before it; kids: one
  kSign,       // value (1 or -1); kids: one
  kAttribute,  // name; kids: the object
  kItem,       // kids: the object, the key
  kSlice,      // kids: the object, start, stop, step
  kCall,       // kids: the function, then arguments
  kFilter,     // name, native (nullptr: there is none); kids: the value, then arguments
  kTest,       // the same
  kKeyword,    // name; kids: the value. An argument, as is the next
  kSpread,     // kids: a list
  kMacro,      // name; kids: parameters (kName, with its default if it has one), body
  kCapture,    // kids: a body; its value is what that prints
  // Statements: their value is undefined, which prints nothing.
  kBody,        // kids, whose values are printed
  kFor,         // kids: target, iterable, condition (a kBody: none), body, else
  kSet,         // kids: target, value
  kGeneration,  // kids: body
  kBreak,
  kContinue,
};

struct Node {
  Kind kind = Kind::kConst;
  uint16_t height = 1;  // nodes on the longest way down
  uint32_t at = 0;      // byte of the source
  std::string_view name = {};
  Value value = {};
  const Native* native = nullptr;
  const Operator* op = nullptr;
  std::vector<Node> kids = {};
};

// Of expressions and blocks: whatever walks the tree is recursive.
constexpr int kMaxNesting = 150;

struct Document {
  std::string source;  // with \n for line breaks, and without one at the end
  Heap constants{RenderLimits{.depth = kMaxNesting}};
  Node body;  // refers to the source and the constants
  bool has_generation_blocks = false;
};

// Fills in the rest for a source. Throws Fault with its place.
void parse(Document& document, TemplateOptions options);

}  // namespace cohort::jinja
