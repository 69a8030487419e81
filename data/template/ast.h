// What the parser makes of a template.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/chat_template.h"
#include "data/template/value.h"

namespace cohort::jinja {

enum class ExprKind : uint8_t {
  kConst,           // value
  kName,            // name
  kNamespaceField,  // name of the field; kids: the namespace. A target of {% set %} only
  kTuple,           // kids
  kList,            // kids
  kDict,            // kids: key, value, key, value, ...
  kConditional,     // kids: then, condition, and else if there is one
  kOr,              // kids: two
  kAnd,
  kNot,        // kids: one
  kCompare,    // kids: the first operand, then a kOperand for each comparison
  kOperand,    // op; kids: one
  kBinary,     // op; kids: two
  kUnary,      // op (kSub or kAdd); kids: one
  kConcat,     // kids
  kAttribute,  // name; kids: the object
  kItem,       // kids: the object, the key
  kSlice,      // kids: start, stop, step, none where absent. As the key of kItem only
  kCall,       // kids: the function, then arguments
  kFilter,     // native, name; kids: the value, then arguments
  kTest,
  kKeyword,         // name; kids: the value. An argument, as the two below
  kSpread,          // kids: a list
  kSpreadKeywords,  // kids: a dict
};

enum class Op : uint8_t {
  kAdd,
  kSub,
  kMul,
  kDiv,
  kFloorDiv,
  kMod,
  kPow,
  kEqual,
  kNotEqual,
  kLess,
  kLessEqual,
  kGreater,
  kGreaterEqual,
  kIn,
  kNotIn,
};

struct Expr {
  ExprKind kind = ExprKind::kConst;
  Op op = Op::kAdd;
  uint16_t height = 1;  // nodes on the longest way down
  uint32_t at = 0;      // byte of the source
  std::string name;
  Value value;
  const Native* native = nullptr;  // nullptr: there is none of that name
  std::vector<Expr> kids;
};

enum class StmtKind : uint8_t {
  kText,         // text
  kOutput,       // exprs
  kIf,           // exprs: conditions; bodies: one each, and one more for {% else %}
  kFor,          // exprs: target, iterable, and the condition if there is one; bodies: body, else
  kSet,          // exprs: target, value
  kSetBlock,     // exprs: target, filters if there are some; bodies: one
  kFilterBlock,  // exprs: filters; bodies: one
  kMacro,        // name; exprs: parameters (kName, a default as its kid); bodies: one
  kCallBlock,    // exprs: the call, then parameters of its body; bodies: one
  kWith,         // exprs: target, value, ...; bodies: one
  kScope,        // bodies: one
  kGeneration,   // bodies: one
  kBreak,
  kContinue,
};

// Special names that a body mentions: it gets them only if it does.
enum Mention : uint8_t { kLoop = 1, kCaller = 2, kKwargs = 4, kVarargs = 8 };

struct Stmt;
using Body = std::vector<Stmt>;
struct Stmt {
  StmtKind kind = StmtKind::kText;
  uint8_t mentions = 0;
  bool recursive = false;  // of kFor
  uint32_t at = 0;
  std::string text;  // or the name of a macro
  std::vector<Expr> exprs;
  std::vector<Body> bodies;
};

// In filters of a block: the name of what the block has printed.
inline constexpr std::string_view kCaptured = "";

struct Document {
  std::string source;  // normalized
  Body body;
  bool has_generation_blocks = false;
};

// With \n for line breaks, and without one at the end: what places refer to.
std::string normalize_lines(std::string_view source);
// Of a normalized source. Throws Fault with its place.
Document parse(std::string source, TemplateOptions options);

}  // namespace cohort::jinja
