// The statements of a template.
#include "data/template/parser.h"

#include <algorithm>

#include "data/template/natives.h"
#include "data/utf8.h"

namespace cohort::jinja {

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
  if (++tokens_ > kMaxTokens) fail(str("a template of more than ", kMaxTokens, " tokens"));
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
