// A parser by recursive descent, with Jinja's grammar and precedences: statements in parser.cpp,
// expressions in expressions.cpp.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.h"
#include "data/template/ast.h"
#include "data/template/lexer.h"

namespace cohort::jinja {

// Of expressions and blocks: whatever walks the tree is recursive.
inline constexpr int kMaxNesting = 150;
// Real templates have some thousands.
inline constexpr int kMaxTokens = 200'000;

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
  int depth_ = 0, tokens_ = 0;
  int loops_ = 0;      // {% for %} around, within the innermost macro: where {% break %} may stand
  int all_loops_ = 0;  // and beyond macros
  uint8_t mentions_ = 0;
  bool has_generation_ = false;
  // Filters and tests that do not exist. They are errors at once, unless a condition guards them.
  std::vector<std::pair<std::string, size_t>> unknown_;
};

}  // namespace cohort::jinja
