// The expressions of a template.
#include <algorithm>

#include "data/template/natives.h"
#include "data/template/parser.h"
#include "data/utf8.h"

namespace cohort::jinja {
namespace {

struct NamedOp {
  std::string_view name;
  Op op;
};
constexpr NamedOp kComparisons[] = {{"==", Op::kEqual},  {"!=", Op::kNotEqual},
                                    {"<", Op::kLess},    {"<=", Op::kLessEqual},
                                    {">", Op::kGreater}, {">=", Op::kGreaterEqual}};
// Left-associative operators from the weakest to the strongest; '~' takes all its operands at once.
constexpr NamedOp kSums[] = {{"+", Op::kAdd}, {"-", Op::kSub}};
constexpr NamedOp kConcats[] = {{"~", Op::kAdd}};
constexpr NamedOp kProducts[] = {
    {"*", Op::kMul}, {"/", Op::kDiv}, {"//", Op::kFloorDiv}, {"%", Op::kMod}};
constexpr NamedOp kPowers[] = {{"**", Op::kPow}};
constexpr std::span<const NamedOp> kLevels[] = {kSums, kConcats, kProducts, kPowers};

struct MentionedName {
  std::string_view name;
  Mention mention;
};
constexpr MentionedName kMentions[] = {
    {"loop", kLoop}, {"caller", kCaller}, {"kwargs", kKwargs}, {"varargs", kVarargs}};

}  // namespace

Expr Parser::conditional() {
  Nested nested(*this);
  const size_t at = token_.at, unknown = unknown_.size();
  Expr e = disjunction();
  while (skip_name("if")) {
    Expr condition = disjunction();
    e = binary(ExprKind::kConditional, at, std::move(e), std::move(condition));
    if (skip_name("else")) {
      e.kids.push_back(conditional());
      e = make(ExprKind::kConditional, at, std::move(e.kids));
    }
    unknown_.resize(unknown);
  }
  return e;
}

Expr Parser::disjunction() {
  const size_t at = token_.at;
  Expr e = conjunction();
  while (skip_name("or")) e = binary(ExprKind::kOr, at, std::move(e), conjunction());
  return e;
}

Expr Parser::conjunction() {
  const size_t at = token_.at;
  Expr e = negation();
  while (skip_name("and")) e = binary(ExprKind::kAnd, at, std::move(e), negation());
  return e;
}

Expr Parser::negation() {
  if (!is_name("not")) return comparison();
  Nested nested(*this);
  const size_t at = token_.at;
  advance();
  std::vector<Expr> kids;
  kids.push_back(negation());
  return make(ExprKind::kNot, at, std::move(kids));
}

Expr Parser::comparison() {
  const size_t at = token_.at;
  std::vector<Expr> kids;
  kids.push_back(arithmetic(0));
  while (true) {
    const size_t op_at = token_.at;
    std::optional<Op> op;
    for (const NamedOp& known : kComparisons)
      if (is_op(known.name)) op = known.op;
    if (is_name("in")) op = Op::kIn;
    if (is_name("not") && look().type == Tok::kName && look().text == "in") {
      advance();
      op = Op::kNotIn;
    }
    if (!op) break;
    advance();
    std::vector<Expr> operand;
    operand.push_back(arithmetic(0));
    kids.push_back(make(ExprKind::kOperand, op_at, std::move(operand)));
    kids.back().op = *op;
  }
  if (kids.size() == 1) return std::move(kids[0]);
  return make(ExprKind::kCompare, at, std::move(kids));
}

Expr Parser::arithmetic(size_t level) {
  if (level == std::size(kLevels)) return unary(true);
  Expr e = arithmetic(level + 1);
  while (true) {
    const size_t at = token_.at;
    const auto op = std::find_if(kLevels[level].begin(), kLevels[level].end(),
                                 [&](const NamedOp& o) { return is_op(o.name); });
    if (op == kLevels[level].end()) return e;
    advance();
    if (op->name != "~") {
      e = binary(ExprKind::kBinary, at, std::move(e), arithmetic(level + 1), op->op);
      continue;
    }
    std::vector<Expr> kids;
    kids.push_back(std::move(e));
    do kids.push_back(arithmetic(level + 1));
    while (skip_op("~"));
    e = make(ExprKind::kConcat, at, std::move(kids));
  }
}

Expr Parser::unary(bool with_filters) {
  Nested nested(*this);
  const size_t at = token_.at;
  Expr e;
  if (is_op("-") || is_op("+")) {
    const Op op = is_op("-") ? Op::kSub : Op::kAdd;
    advance();
    std::vector<Expr> kids;
    kids.push_back(unary(false));
    e = make(ExprKind::kUnary, at, std::move(kids));
    e.op = op;
  } else {
    e = primary({});
  }
  e = postfix(std::move(e));
  return with_filters ? filters(std::move(e)) : std::move(e);
}

Expr Parser::primary(Listing listing) {
  Expr e;
  e.at = static_cast<uint32_t>(token_.at);
  if (token_.type == Tok::kName) {
    const std::string name = take_name();
    if (name == "true" || name == "True" || name == "false" || name == "False") {
      e.value = Value(name == "true" || name == "True");
    } else if (name == "none" || name == "None") {
      e.value = Value::none();
    } else {
      e.kind = ExprKind::kName;
      e.name = name;
      for (const MentionedName& m : kMentions)
        if (name == m.name && !listing.targets) mentions_ |= m.mention;
      if (listing.fields && skip_op(".")) {
        const size_t at = e.at;
        std::vector<Expr> kids;
        kids.push_back(std::move(e));
        e = make(ExprKind::kNamespaceField, at, std::move(kids));
        e.name = take_name();
      }
    }
    return e;
  }
  if (token_.type == Tok::kString) {
    std::string text;
    for (; token_.type == Tok::kString; advance()) text += token_.text;
    e.value = Value(std::make_shared<const Text>(std::move(text), false, nullptr));
    return e;
  }
  if (token_.type == Tok::kNumber) {
    e.value = token_.value;
    advance();
    return e;
  }
  if (is_op("[")) return list();
  if (is_op("{")) return dict();
  if (!skip_op("(")) fail("unexpected " + describe());
  Nested nested(*this);
  e = tuple({.parentheses = true});
  expect_op(")");
  return e;
}

// Expressions with commas between them: a tuple, or the only one.
Expr Parser::tuple(Listing listing) {
  const size_t at = token_.at;
  std::vector<Expr> kids;
  bool comma = false;
  while (token_.type != Tok::kVariableEnd && token_.type != Tok::kBlockEnd && !is_op(")") &&
         (listing.end.empty() || !is_name(listing.end))) {
    kids.push_back(listing.targets        ? primary(listing)
                   : listing.conditionals ? expression()
                                          : disjunction());
    if (!skip_op(",")) break;
    comma = true;
  }
  if (!comma && !kids.empty()) return std::move(kids[0]);
  if (kids.empty() && !listing.parentheses) fail("expected an expression, got " + describe());
  return make(ExprKind::kTuple, at, std::move(kids));
}

Expr Parser::list() {
  const size_t at = token_.at;
  std::vector<Expr> kids;
  expect_op("[");
  while (!is_op("]")) {
    kids.push_back(expression());
    if (!is_op("]")) expect_op(",");
  }
  advance();
  return make(ExprKind::kList, at, std::move(kids));
}

Expr Parser::dict() {
  const size_t at = token_.at;
  std::vector<Expr> kids;
  expect_op("{");
  while (!is_op("}")) {
    kids.push_back(expression());
    expect_op(":");
    kids.push_back(expression());
    if (!is_op("}")) expect_op(",");
  }
  advance();
  return make(ExprKind::kDict, at, std::move(kids));
}

Expr Parser::postfix(Expr e) {
  while (true) {
    if (is_op(".") || is_op("[")) {
      e = subscript(std::move(e));
    } else if (is_op("(")) {
      const size_t at = token_.at;
      std::vector<Expr> kids;
      kids.push_back(std::move(e));
      arguments(kids);
      e = make(ExprKind::kCall, at, std::move(kids));
    } else {
      return e;
    }
  }
}

Expr Parser::subscript(Expr object) {
  const size_t at = token_.at;
  std::vector<Expr> kids;
  kids.push_back(std::move(object));
  if (skip_op(".")) {
    if (token_.type == Tok::kNumber && token_.value.is_int()) {
      kids.push_back(primary({}));
      return make(ExprKind::kItem, at, std::move(kids));
    }
    Expr e = make(ExprKind::kAttribute, at, std::move(kids));
    e.name = take_name();
    return e;
  }
  expect_op("[");
  std::vector<Expr> keys;
  while (!is_op("]")) {
    if (!keys.empty()) expect_op(",");
    keys.push_back(subscript_key());
  }
  advance();
  if (keys.size() == 1)
    kids.push_back(std::move(keys[0]));
  else
    kids.push_back(make(ExprKind::kTuple, at, std::move(keys)));
  return make(ExprKind::kItem, at, std::move(kids));
}

Expr Parser::subscript_key() {
  const size_t at = token_.at;
  std::vector<Expr> parts;
  const auto take_part = [&] {
    Expr none;
    none.value = Value::none();
    const bool given = !is_op(":") && !is_op("]") && !is_op(",");
    parts.push_back(given ? expression() : std::move(none));
  };
  if (!is_op(":")) {
    Expr e = expression();
    if (!is_op(":")) return e;
    parts.push_back(std::move(e));
  } else {
    take_part();
  }
  advance();
  take_part();
  skip_op(":");
  take_part();
  return make(ExprKind::kSlice, at, std::move(parts));
}

void Parser::arguments(std::vector<Expr>& kids) {
  ExprKind last = ExprKind::kConst;
  expect_op("(");
  while (!is_op(")")) {
    const size_t at = token_.at;
    std::string name;
    ExprKind kind = ExprKind::kConst;
    if (skip_op("*")) {
      kind = ExprKind::kSpread;
    } else if (skip_op("**")) {
      kind = ExprKind::kSpreadKeywords;
    } else if (token_.type == Tok::kName && look().type == Tok::kOperator && look().text == "=") {
      kind = ExprKind::kKeyword;
      name = take_name();
      advance();
    }
    const bool in_order = kind == ExprKind::kConst ? last == ExprKind::kConst
                          : kind == ExprKind::kSpread
                              ? last != kind && last != ExprKind::kSpreadKeywords
                              : last != ExprKind::kSpreadKeywords;
    if (!in_order) fail("arguments of a call in the wrong order");
    if (last != ExprKind::kSpread || kind != ExprKind::kKeyword) last = kind;
    if (kind == ExprKind::kConst) {
      kids.push_back(expression());
    } else {
      std::vector<Expr> value;
      value.push_back(expression());
      kids.push_back(make(kind, at, std::move(value)));
      kids.back().name = std::move(name);
    }
    if (!is_op(")")) expect_op(",");
  }
  advance();
}

Expr Parser::filters(Expr e) {
  while (true) {
    if (skip_op("|")) {
      e = filter(std::move(e));
    } else if (is_name("is")) {
      e = test(std::move(e));
    } else if (is_op("(")) {
      const size_t at = token_.at;
      std::vector<Expr> kids;
      kids.push_back(std::move(e));
      arguments(kids);
      e = make(ExprKind::kCall, at, std::move(kids));
    } else {
      return e;
    }
  }
}

std::string Parser::dotted_name() {
  std::string name = take_name();
  while (skip_op(".")) name.append(".").append(take_name());
  return name;
}

Expr Parser::filter(Expr value) {
  const size_t at = token_.at;
  const std::string name = dotted_name();
  std::vector<Expr> kids;
  kids.push_back(std::move(value));
  if (is_op("(")) arguments(kids);
  Expr e = make(ExprKind::kFilter, at, std::move(kids));
  e.name = name;
  e.native = find_filter(name);
  if (e.native == nullptr) unknown_.emplace_back("there is no filter " + excerpt(name), at);
  return e;
}

Expr Parser::test(Expr value) {
  advance();
  const size_t at = token_.at;
  const bool negated = skip_name("not");
  const std::string name = dotted_name();
  std::vector<Expr> kids;
  kids.push_back(std::move(value));
  if (is_op("(")) {
    arguments(kids);
  } else if (token_.type == Tok::kString || token_.type == Tok::kNumber || is_op("[") ||
             is_op("{") ||
             (token_.type == Tok::kName && !is_name("else") && !is_name("or") && !is_name("and"))) {
    if (is_name("is")) fail("tests with 'is' cannot be chained");
    kids.push_back(postfix(primary({})));
  }
  Expr e = make(ExprKind::kTest, at, std::move(kids));
  e.name = name;
  e.native = find_test(name);
  if (e.native == nullptr) unknown_.emplace_back("there is no test " + excerpt(name), at);
  if (!negated) return e;
  std::vector<Expr> inner;
  inner.push_back(std::move(e));
  return make(ExprKind::kNot, at, std::move(inner));
}

}  // namespace cohort::jinja
