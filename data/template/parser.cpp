// A parser by recursive descent, with Jinja's grammar and precedences.
#include <algorithm>
#include <array>
#include <optional>
#include <span>

#include "data/template/ast.h"
#include "data/template/lexer.h"
#include "data/template/natives.h"
#include "data/utf8.h"

namespace cohort::jinja {
namespace {

// Of expressions and blocks: whatever walks the tree is recursive.
constexpr int kMaxNesting = 150;

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

class Parser {
 public:
  Parser(std::string_view source, TemplateOptions options) : lexer_(source, options) { advance(); }
  Document take() {
    Document document;
    document.body = body({});
    refuse_unknown(0);
    document.has_generation_blocks = has_generation_;
    return document;
  }

 private:
  using Ends = std::span<const std::string_view>;
  // Which expressions a list of them may hold, and what may end it.
  struct Listing {
    bool conditionals = true;   // `a if b else c`
    bool targets = false;       // names only, as something is assigned to them
    bool fields = false;        // with `targets`: also fields of namespaces
    bool parentheses = false;   // "()" is the empty one
    std::string_view end = {};  // a name
  };

  // Counts the nesting of what is being parsed.
  class Nested {
   public:
    explicit Nested(Parser& parser) : parser_(parser) {
      if (++parser_.depth_ > kMaxNesting) parser_.fail(str("nested deeper than ", kMaxNesting));
    }
    ~Nested() { --parser_.depth_; }
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;

   private:
    Parser& parser_;
  };

  [[noreturn]] void fail(const std::string& message) const { throw Fault(message, token_.at); }
  std::string describe() const;
  void advance();
  const Token& look();
  bool is(Tok type, std::string_view text) const {
    return token_.type == type && token_.text == text;
  }
  bool is_op(std::string_view text) const { return is(Tok::kOperator, text); }
  bool is_name(std::string_view text) const { return is(Tok::kName, text); }
  bool skip_op(std::string_view text);
  bool skip_name(std::string_view text);
  void expect_op(std::string_view text);
  void expect_name(std::string_view text);
  std::string take_name();
  void expect_end(Tok type);

  Expr make(ExprKind kind, size_t at, std::vector<Expr> kids);
  Expr binary(ExprKind kind, size_t at, Expr left, Expr right, Op op = Op::kAdd);
  void refuse_unknown(size_t from) const;

  Body body(Ends ends);
  Body block(Ends ends);
  Body inner_block(Ends ends);
  Stmt statement();
  void for_statement(Stmt& s);
  void if_statement(Stmt& s);
  void set_statement(Stmt& s);
  void macro_statement(Stmt& s);
  void call_statement(Stmt& s);
  void filter_statement(Stmt& s);
  void with_statement(Stmt& s);
  void print_statement(Stmt& s);
  void scope_statement(Stmt& s);
  void generation_statement(Stmt& s);
  void jump_statement(Stmt& s);
  Body function_body(Stmt& s, Ends ends);
  void signature(Stmt& s);
  Expr target(Listing listing);
  void check_target(const Expr& e) const;

  Expr expression() { return conditional(); }
  Expr conditional();
  Expr disjunction();
  Expr conjunction();
  Expr negation();
  Expr comparison();
  Expr arithmetic(size_t level);
  Expr unary(bool with_filters);
  Expr postfix(Expr e);
  Expr filters(Expr e);
  Expr filter(Expr e);
  Expr test(Expr e);
  Expr primary(Listing listing);
  Expr tuple(Listing listing);
  Expr list();
  Expr dict();
  Expr subscript(Expr object);
  Expr subscript_key();
  void arguments(std::vector<Expr>& kids);
  std::string dotted_name();

  struct Keyword {
    std::string_view name;
    StmtKind kind;
    void (Parser::*parse)(Stmt&);
  };
  static const Keyword kKeywords[];

  Lexer lexer_;
  Token token_;
  std::optional<Token> ahead_;
  int depth_ = 0;
  int loops_ = 0;      // {% for %} around, within the innermost macro: where {% break %} may stand
  int all_loops_ = 0;  // and beyond macros
  uint8_t mentions_ = 0;
  bool has_generation_ = false;
  // Filters and tests that do not exist. They are errors at once, unless a condition guards them.
  std::vector<std::pair<std::string, size_t>> unknown_;
};

const Parser::Keyword Parser::kKeywords[] = {
    {"for", StmtKind::kFor, &Parser::for_statement},
    {"if", StmtKind::kIf, &Parser::if_statement},
    {"set", StmtKind::kSet, &Parser::set_statement},
    {"macro", StmtKind::kMacro, &Parser::macro_statement},
    {"call", StmtKind::kCallBlock, &Parser::call_statement},
    {"filter", StmtKind::kFilterBlock, &Parser::filter_statement},
    {"with", StmtKind::kWith, &Parser::with_statement},
    {"print", StmtKind::kOutput, &Parser::print_statement},
    {"block", StmtKind::kScope, &Parser::scope_statement},
    {"generation", StmtKind::kGeneration, &Parser::generation_statement},
    {"break", StmtKind::kBreak, &Parser::jump_statement},
    {"continue", StmtKind::kContinue, &Parser::jump_statement},
};

std::string Parser::describe() const {
  switch (token_.type) {
    case Tok::kEnd:
      return "the end of the template";
    case Tok::kVariableEnd:
      return "'}}'";
    case Tok::kBlockEnd:
      return "'%}'";
    case Tok::kNumber:
      return "a number";
    case Tok::kString:
      return "the string " + excerpt(token_.text);
    default:
      return excerpt(token_.text);
  }
}

void Parser::advance() {
  if (ahead_) {
    token_ = std::move(*ahead_);
    ahead_.reset();
  } else {
    token_ = lexer_.next();
  }
}

const Token& Parser::look() {
  if (!ahead_) ahead_ = lexer_.next();
  return *ahead_;
}

bool Parser::skip_op(std::string_view text) {
  if (!is_op(text)) return false;
  advance();
  return true;
}

bool Parser::skip_name(std::string_view text) {
  if (!is_name(text)) return false;
  advance();
  return true;
}

void Parser::expect_op(std::string_view text) {
  if (!skip_op(text)) fail(str("expected '", text, "', got ", describe()));
}

void Parser::expect_name(std::string_view text) {
  if (!skip_name(text)) fail(str("expected '", text, "', got ", describe()));
}

std::string Parser::take_name() {
  if (token_.type != Tok::kName) fail("expected a name, got " + describe());
  std::string name = std::move(token_.text);
  advance();
  return name;
}

void Parser::expect_end(Tok type) {
  if (token_.type != type)
    fail(str("expected ", type == Tok::kBlockEnd ? "'%}'" : "'}}'", ", got ", describe()));
  advance();
}

Expr Parser::make(ExprKind kind, size_t at, std::vector<Expr> kids) {
  Expr e;
  e.kind = kind;
  e.at = static_cast<uint32_t>(at);
  for (const Expr& kid : kids) e.height = std::max(e.height, static_cast<uint16_t>(kid.height + 1));
  if (e.height > kMaxNesting)
    throw Fault(str("an expression is nested deeper than ", kMaxNesting), at);
  e.kids = std::move(kids);
  return e;
}

Expr Parser::binary(ExprKind kind, size_t at, Expr left, Expr right, Op op) {
  std::vector<Expr> kids;
  kids.push_back(std::move(left));
  kids.push_back(std::move(right));
  Expr e = make(kind, at, std::move(kids));
  e.op = op;
  return e;
}

void Parser::refuse_unknown(size_t from) const {
  if (unknown_.size() > from) throw Fault(unknown_[from].first, unknown_[from].second);
}

// Statements up to one of the tags of `ends`, whose name is then the current token; to the end of
// the template if there are none.
Body Parser::body(Ends ends) {
  Nested nested(*this);
  Body out;
  while (token_.type != Tok::kEnd) {
    Stmt s;
    s.at = static_cast<uint32_t>(token_.at);
    if (token_.type == Tok::kData) {
      s.text = std::move(token_.text);
      advance();
      if (!s.text.empty()) out.push_back(std::move(s));
    } else if (token_.type == Tok::kVariableBegin) {
      advance();
      s.kind = StmtKind::kOutput;
      s.exprs.push_back(tuple({}));
      expect_end(Tok::kVariableEnd);
      out.push_back(std::move(s));
    } else {
      advance();
      if (token_.type != Tok::kName) fail("expected the name of a tag, got " + describe());
      if (std::find(ends.begin(), ends.end(), token_.text) != ends.end()) return out;
      out.push_back(statement());
      expect_end(Tok::kBlockEnd);
    }
  }
  if (!ends.empty()) fail(str("the template ends where {% ", ends.back(), " %} is missing"));
  return out;
}

// A body, from the end of its tag.
Body Parser::block(Ends ends) {
  skip_op(":");
  expect_end(Tok::kBlockEnd);
  return body(ends);
}

// A body with names of its own: conditions around it guard nothing in it.
Body Parser::inner_block(Ends ends) {
  const size_t unknown = unknown_.size();
  Body out = block(ends);
  refuse_unknown(unknown);
  return out;
}

Stmt Parser::statement() {
  const auto* keyword = std::find_if(std::begin(kKeywords), std::end(kKeywords),
                                     [&](const Keyword& k) { return k.name == token_.text; });
  if (keyword == std::end(kKeywords)) {
    const bool loads = token_.text == "include" || token_.text == "import" ||
                       token_.text == "from" || token_.text == "extends";
    fail(loads ? "a chat template cannot load others: " + describe()
               : "unknown tag " + describe() + ", or one that closes nothing here");
  }
  Stmt s;
  s.kind = keyword->kind;
  s.at = static_cast<uint32_t>(token_.at);
  advance();
  (this->*keyword->parse)(s);
  return s;
}

void Parser::for_statement(Stmt& s) {
  ++loops_;
  ++all_loops_;
  s.exprs.push_back(target({.targets = true, .end = "in"}));
  expect_name("in");
  s.exprs.push_back(tuple({.conditionals = false, .end = "recursive"}));
  if (skip_name("if")) s.exprs.push_back(expression());
  s.recursive = skip_name("recursive");
  const uint8_t outside = std::exchange(mentions_, 0);
  constexpr std::string_view kEnds[] = {"else", "endfor"};
  s.bodies.push_back(inner_block(kEnds));
  s.mentions = mentions_;
  mentions_ |= outside;
  --loops_;
  --all_loops_;
  if (skip_name("else")) s.bodies.push_back(inner_block(std::span(kEnds).subspan(1)));
  advance();
}

void Parser::if_statement(Stmt& s) {
  const size_t unknown = unknown_.size();
  constexpr std::string_view kEnds[] = {"elif", "else", "endif"};
  do {
    s.exprs.push_back(tuple({.conditionals = false}));
    s.bodies.push_back(block(kEnds));
  } while (skip_name("elif"));
  if (skip_name("else")) s.bodies.push_back(block(std::span(kEnds).subspan(2)));
  advance();
  unknown_.resize(unknown);
}

void Parser::set_statement(Stmt& s) {
  s.exprs.push_back(target({.targets = true, .fields = true}));
  if (skip_op("=")) {
    s.exprs.push_back(tuple({}));
    return;
  }
  s.kind = StmtKind::kSetBlock;
  if (is_op("|")) {
    Expr captured;
    captured.kind = ExprKind::kName;
    captured.name = kCaptured;
    while (skip_op("|")) captured = filter(std::move(captured));
    s.exprs.push_back(std::move(captured));
  }
  constexpr std::string_view kEnds[] = {"endset"};
  s.bodies.push_back(inner_block(kEnds));
  advance();
}

// Parameters of a macro or of the body of a {% call %}.
void Parser::signature(Stmt& s) {
  const size_t first = s.exprs.size();
  expect_op("(");
  while (!is_op(")")) {
    if (s.exprs.size() > first) expect_op(",");
    Expr parameter;
    parameter.kind = ExprKind::kName;
    parameter.at = static_cast<uint32_t>(token_.at);
    parameter.name = take_name();
    check_target(parameter);
    if (skip_op("="))
      parameter.kids.push_back(expression());
    else if (s.exprs.size() > first && !s.exprs.back().kids.empty())
      fail("a parameter without default follows one with a default");
    s.exprs.push_back(std::move(parameter));
  }
  expect_op(")");
}

Body Parser::function_body(Stmt& s, Ends ends) {
  const int loops = std::exchange(loops_, 0);
  const uint8_t outside = std::exchange(mentions_, 0);
  Body out = inner_block(ends);
  s.mentions = mentions_;
  mentions_ |= outside;
  loops_ = loops;
  advance();
  return out;
}

void Parser::macro_statement(Stmt& s) {
  s.text = take_name();
  signature(s);
  constexpr std::string_view kEnds[] = {"endmacro"};
  s.bodies.push_back(function_body(s, kEnds));
  for (const Expr& parameter : s.exprs)
    if (parameter.name == "caller" && parameter.kids.empty() && (s.mentions & kCaller))
      throw Fault("the parameter 'caller' of a macro needs a default", parameter.at);
}

void Parser::call_statement(Stmt& s) {
  s.exprs.emplace_back();
  if (is_op("(")) signature(s);
  s.exprs[0] = expression();
  if (s.exprs[0].kind != ExprKind::kCall) fail("expected a call in {% call %}");
  constexpr std::string_view kEnds[] = {"endcall"};
  s.bodies.push_back(function_body(s, kEnds));
}

void Parser::filter_statement(Stmt& s) {
  Expr captured;
  captured.kind = ExprKind::kName;
  captured.name = kCaptured;
  do captured = filter(std::move(captured));
  while (skip_op("|"));
  s.exprs.push_back(std::move(captured));
  constexpr std::string_view kEnds[] = {"endfilter"};
  s.bodies.push_back(inner_block(kEnds));
  advance();
}

void Parser::with_statement(Stmt& s) {
  while (token_.type != Tok::kBlockEnd) {
    if (!s.exprs.empty()) expect_op(",");
    s.exprs.push_back(target({.targets = true}));
    expect_op("=");
    s.exprs.push_back(expression());
  }
  constexpr std::string_view kEnds[] = {"endwith"};
  s.bodies.push_back(inner_block(kEnds));
  advance();
}

void Parser::print_statement(Stmt& s) {
  while (token_.type != Tok::kBlockEnd) {
    if (!s.exprs.empty()) expect_op(",");
    s.exprs.push_back(expression());
  }
}

void Parser::scope_statement(Stmt& s) {
  const std::string name = take_name();
  constexpr std::string_view kEnds[] = {"endblock"};
  s.bodies.push_back(function_body(s, kEnds));
  skip_name(name);
}

void Parser::generation_statement(Stmt& s) {
  has_generation_ = true;
  constexpr std::string_view kEnds[] = {"endgeneration"};
  s.bodies.push_back(function_body(s, kEnds));
}

void Parser::jump_statement(Stmt& s) {
  if (loops_ == 0)
    throw Fault("{% break %} and {% continue %} stand inside a {% for %} only", s.at);
}

Expr Parser::target(Listing listing) {
  Expr e = tuple(listing);
  check_target(e);
  return e;
}

void Parser::check_target(const Expr& e) const {
  if (e.kind == ExprKind::kTuple) {
    for (const Expr& kid : e.kids) check_target(kid);
  } else if (e.kind != ExprKind::kName && e.kind != ExprKind::kNamespaceField) {
    throw Fault("nothing can be assigned to this expression", e.at);
  } else if (e.kind == ExprKind::kName && e.name == "loop" && all_loops_ > 0) {
    throw Fault("'loop' cannot be assigned to inside a {% for %}", e.at);
  }
}

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

}  // namespace

std::string normalize_lines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t at = 0; at < source.size(); ++at) {
    if (source[at] != '\r') {
      out += source[at];
    } else {
      out += '\n';
      if (at + 1 < source.size() && source[at + 1] == '\n') ++at;
    }
  }
  if (out.ends_with('\n')) out.pop_back();
  return out;
}

Document parse(std::string source, TemplateOptions options) {
  Document document = Parser(source, options).take();
  document.source = std::move(source);
  return document;
}

}  // namespace cohort::jinja
