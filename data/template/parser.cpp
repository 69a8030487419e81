// A parser by recursive descent, with Jinja's grammar and precedences.
#include "data/template/parser.h"

#include <algorithm>
#include <initializer_list>

#include "data/template/lexer.h"
#include "data/template/natives.h"
#include "data/utf8.h"

namespace cohort::jinja {
namespace {

// Of expressions and blocks: whatever walks the tree is recursive.
constexpr int kMaxNesting = 150;

class Parser {
 public:
  Parser(std::string_view source, TemplateOptions options) : tokens_(lex(source, options)) {}
  Node document() { return statements({}); }
  bool has_generation_blocks() const { return has_generation_; }

 private:
  using Names = std::initializer_list<std::string_view>;

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

  // Tokens.

  const Token& peek(size_t ahead = 0) const {
    return tokens_[std::min(next_ + ahead, tokens_.size() - 1)];
  }
  const Token& take() { return tokens_[std::min(next_++, tokens_.size() - 1)]; }
  bool is(std::string_view text, size_t ahead = 0) const {
    const Tok type = peek(ahead).type;
    return (type == Tok::kName || type == Tok::kOperator) && peek(ahead).text == text;
  }
  bool is_any(Names names) const {
    return std::any_of(names.begin(), names.end(), [&](std::string_view name) { return is(name); });
  }
  bool skip(std::string_view text) {
    const bool found = is(text);
    next_ += found;
    return found;
  }
  [[noreturn]] void fail(const std::string& message) const { throw Fault(message, peek().at); }
  [[noreturn]] void fail_expecting(const std::string& what) const {
    fail(str("expected ", what, ", got ",
             peek().type == Tok::kEnd ? "the end of the template" : excerpt(peek().text)));
  }
  void expect(std::string_view text) {
    if (!skip(text)) fail_expecting(str("'", text, "'"));
  }
  std::string_view take_name() {
    if (peek().type != Tok::kName) fail_expecting("a name");
    return take().text;
  }

  // Nodes.

  template <class... Kids>
  Node make(Kind kind, size_t at, Kids... kids) {
    Node node;
    node.kind = kind;
    node.at = static_cast<uint32_t>(at);
    (add(node, std::move(kids)), ...);
    return node;
  }
  Node named(Kind kind, size_t at, std::string_view name) {
    Node node = make(kind, at);
    node.name = name;
    return node;
  }
  Node constant(size_t at, Value value) {
    Node node = make(Kind::kConst, at);
    node.value = std::move(value);
    return node;
  }
  void add(Node& parent, Node kid) {
    if (kid.height >= kMaxNesting) throw Fault(str("nested deeper than ", kMaxNesting), parent.at);
    parent.height = std::max<uint16_t>(parent.height, kid.height + 1);
    parent.kids.push_back(std::move(kid));
  }

  // Statements.

  struct Keyword {
    std::string_view name;
    Node (Parser::*parse)(size_t at);
  };
  static const Keyword kKeywords[];

  // Up to a tag of `ends`, whose name is the next token then; to the end of the template if there
  // are none.
  Node statements(Names ends) {
    const Nested nested(*this);
    Node body = make(Kind::kBody, peek().at);
    while (peek().type != Tok::kEnd) {
      const Token& token = take();
      if (token.type == Tok::kData) {
        add(body, named(Kind::kText, token.at, token.text));
      } else if (token.text == "{{") {
        add(body, make(Kind::kOutput, token.at, expressions()));
        expect("}}");
      } else if (is_any(ends)) {
        return body;
      } else {
        add(body, statement());
        expect("%}");
      }
    }
    if (ends.size() > 0) fail(str("{% ", *(ends.end() - 1), " %} is missing"));
    return body;
  }

  Node statement();

  // The statements of a tag that is complete but for its '%}'.
  Node block(Names ends) {
    expect("%}");
    return statements(ends);
  }
  // The same, with the end's name passed.
  Node whole_block(std::string_view end) {
    Node body = block({end});
    take();
    return body;
  }

  Node for_statement(size_t at) {
    Node loop = make(Kind::kFor, at, target());
    expect("in");
    add(loop, list_of(&Parser::disjunction));
    add(loop, skip("if") ? expression() : make(Kind::kConst, at));
    if (is("recursive")) fail("recursive loops are not supported");
    const bool outside = std::exchange(mentions_loop_, false);
    ++loops_;
    add(loop, block({"else", "endfor"}));
    --loops_;
    loop.mentions_loop = std::exchange(mentions_loop_, mentions_loop_ || outside);
    add(loop, skip("else") ? block({"endfor"}) : make(Kind::kBody, at));
    take();
    return loop;
  }

  Node if_statement(size_t at) {
    Node node = make(Kind::kIf, at);
    do {
      add(node, expression());
      add(node, block({"elif", "else", "endif"}));
    } while (skip("elif"));
    add(node, skip("else") ? block({"endif"}) : make(Kind::kBody, at));
    take();
    return node;
  }

  Node set_statement(size_t at) {
    Node to = target();
    if (skip("=")) return make(Kind::kSet, at, std::move(to), expressions());
    Node filtered = filters(named(Kind::kName, at, kCaptured));
    Node body = whole_block("endset");
    return make(Kind::kSetBlock, at, std::move(to), std::move(body), std::move(filtered));
  }

  Node macro_statement(size_t at) {
    const std::string_view name = take_name();
    if (!is("(")) fail_expecting("'('");
    return macro(at, name, "endmacro");
  }

  Node macro(size_t at, std::string_view name, std::string_view end) {
    Node macro = named(Kind::kMacro, at, name);
    if (skip("("))
      while (!skip(")")) {
        Node parameter = named(Kind::kName, peek().at, peek().text);
        take_name();
        if (skip("=")) add(parameter, expression());
        add(macro, std::move(parameter));
        if (!is(")")) expect(",");
      }
    if (end == "endcall") calls_.push_back(expression());
    const bool outside = std::exchange(mentions_loop_, false);
    const int loops = std::exchange(loops_, 0);
    add(macro, whole_block(end));
    loops_ = loops;
    mentions_loop_ = outside;
    return macro;
  }

  Node call_statement(size_t at) {
    Node body = macro(at, "caller", "endcall");
    Node call = std::move(calls_.back());
    calls_.pop_back();
    if (call.kind != Kind::kCall) throw Fault("expected a call in {% call %}", at);
    return make(Kind::kCallBlock, at, std::move(call), std::move(body));
  }

  Node filter_statement(size_t at) {
    Node filtered = filters(filter(named(Kind::kName, at, kCaptured)));
    Node body = whole_block("endfilter");
    return make(Kind::kFilterBlock, at, make(Kind::kConst, at), std::move(body),
                std::move(filtered));
  }

  Node generation_statement(size_t at) {
    has_generation_ = true;
    const int loops = std::exchange(loops_, 0);
    Node node = make(Kind::kGeneration, at, whole_block("endgeneration"));
    loops_ = loops;
    return node;
  }

  template <Kind kind>
  Node jump_statement(size_t at) {
    if (loops_ == 0)
      throw Fault("{% break %} and {% continue %} stand inside a {% for %} only", at);
    return make(kind, at);
  }

  // What something is assigned to: names, fields of namespaces, and tuples of them.
  Node target() {
    const size_t at = peek().at;
    Node first = target_item();
    if (!is(",")) return first;
    Node tuple = make(Kind::kTuple, at, std::move(first));
    while (skip(",") && (peek().type == Tok::kName || is("(")) && !is("in"))
      add(tuple, target_item());
    return tuple;
  }

  Node target_item() {
    const Nested nested(*this);
    const size_t at = peek().at;
    if (skip("(")) {
      Node inner = target();
      expect(")");
      return inner;
    }
    if (is_any({"true", "True", "false", "False", "none", "None", "loop"}))
      fail(str("nothing can be assigned to '", peek().text, "'"));
    Node name = named(Kind::kName, at, take_name());
    if (!skip(".")) return name;
    Node field = make(Kind::kField, at, std::move(name));
    field.name = take_name();
    return field;
  }

  // Expressions, from those that bind loosest.

  Node expressions() { return list_of(&Parser::expression); }

  // One, or a tuple if there are commas.
  Node list_of(Node (Parser::*parse)()) {
    const size_t at = peek().at;
    Node first = (this->*parse)();
    if (!is(",")) return first;
    Node tuple = make(Kind::kTuple, at, std::move(first));
    while (skip(",") && !is_any({")", "}}", "%}"})) add(tuple, (this->*parse)());
    return tuple;
  }

  Node expression() {
    const Nested nested(*this);
    Node e = disjunction();
    while (is("if")) {
      const size_t at = take().at;
      Node condition = disjunction();
      e = make(Kind::kConditional, at, std::move(e), std::move(condition),
               skip("else") ? expression() : constant(at, Value::undefined("no 'else' was given")));
    }
    return e;
  }

  Node disjunction() {
    Node e = conjunction();
    while (is("or")) {
      const size_t at = take().at;
      e = make(Kind::kOr, at, std::move(e), conjunction());
    }
    return e;
  }

  Node conjunction() {
    Node e = negation();
    while (is("and")) {
      const size_t at = take().at;
      e = make(Kind::kAnd, at, std::move(e), negation());
    }
    return e;
  }

  Node negation() {
    if (!is("not")) return comparison();
    const Nested nested(*this);
    const size_t at = take().at;
    return make(Kind::kNot, at, negation());
  }

  Node comparison() {
    Node first = arithmetic(Level::kSum);
    Node all = make(Kind::kCompare, first.at);
    while (true) {
      const size_t at = peek().at;
      const bool is_not_in = is("not") && is("in", 1);
      const Operator* op = find_operator(Level::kComparison, is_not_in ? "not in" : peek().text);
      if (op == nullptr || peek().type == Tok::kConst) break;
      next_ += is_not_in ? 2 : 1;
      if (all.kids.empty()) add(all, std::move(first));
      Node operand = make(Kind::kBinary, at, arithmetic(Level::kSum));
      operand.op = op;
      add(all, std::move(operand));
    }
    return all.kids.empty() ? first : all;
  }

  Node arithmetic(Level level) {
    if (level == Level::kEnd) return unary(Filters::kYes);
    const auto next = static_cast<Level>(static_cast<int>(level) + 1);
    Node e = arithmetic(next);
    while (const Operator* op = find_operator(level, is_operator() ? peek().text : "")) {
      const size_t at = take().at;
      e = make(Kind::kBinary, at, std::move(e), arithmetic(next));
      e.op = op;
    }
    return e;
  }
  bool is_operator() const { return peek().type == Tok::kOperator; }

  enum class Filters : bool { kNo, kYes };
  Node unary(Filters with) {
    const Nested nested(*this);
    const size_t at = peek().at;
    Node e;
    if (is("-") || is("+")) {
      const int64_t sign = take().text == "-" ? -1 : 1;
      e = make(Kind::kSign, at, unary(Filters::kNo));
      e.value = sign;
    } else {
      e = primary();
    }
    e = postfix(std::move(e));
    return with == Filters::kYes ? filters(std::move(e)) : std::move(e);
  }

  Node primary() {
    const Token token = peek();
    Node e = make(Kind::kConst, token.at);
    if (token.type == Tok::kConst) {
      e.value = take().value;
      if (token.value.text() != nullptr && peek().value.text() != nullptr) {
        std::string text = token.value.text()->bytes;
        while (peek().value.text() != nullptr) text += take().value.text()->bytes;
        e.value = std::make_shared<const Text>(std::move(text), Markup::kNo, nullptr);
      }
    } else if (token.type == Tok::kName) {
      take();
      if (is_one_of(token.text, {"true", "True", "false", "False"})) {
        e.value = token.text == "true" || token.text == "True";
      } else if (is_one_of(token.text, {"none", "None"})) {
        e.value = None{};
      } else {
        e = named(Kind::kName, token.at, token.text);
        mentions_loop_ |= token.text == "loop";
      }
    } else if (skip("(")) {
      e = is(")") ? make(Kind::kTuple, token.at) : expressions();
      expect(")");
    } else if (skip("[")) {
      e.kind = Kind::kList;
      while (!skip("]")) {
        add(e, expression());
        if (!is("]")) expect(",");
      }
    } else if (skip("{")) {
      e.kind = Kind::kDict;
      while (!skip("}")) {
        add(e, expression());
        expect(":");
        add(e, expression());
        if (!is("}")) expect(",");
      }
    } else {
      fail_expecting("an expression");
    }
    return e;
  }
  static bool is_one_of(std::string_view text, Names names) {
    return std::find(names.begin(), names.end(), text) != names.end();
  }

  Node postfix(Node e) {
    while (true) {
      const size_t at = peek().at;
      if (is("(")) {
        e = make(Kind::kCall, at, std::move(e));
        arguments(e);
      } else if (skip("[")) {
        e = subscript(at, std::move(e));
      } else if (skip(".")) {
        const bool is_index = peek().type == Tok::kConst;
        e = make(is_index ? Kind::kItem : Kind::kAttribute, at, std::move(e));
        if (is_index)
          add(e, primary());
        else
          e.name = take_name();
      } else {
        return e;
      }
    }
  }

  Node subscript(size_t at, Node object) {
    Node parts = make(Kind::kSlice, at, std::move(object));
    const Node none = constant(at, None{});
    do add(parts, is_any({":", "]"}) ? none : expression());
    while (parts.kids.size() < 4 && skip(":"));
    expect("]");
    if (parts.kids.size() == 2) {
      parts.kind = Kind::kItem;
      return parts;
    }
    while (parts.kids.size() < 4) add(parts, none);
    return parts;
  }

  // Adds those of a call, from its '('.
  void arguments(Node& call) {
    expect("(");
    bool named_before = false;
    while (!skip(")")) {
      const size_t at = peek().at;
      const bool is_keyword = peek().type == Tok::kName && is("=", 1);
      const Kind kind = is_keyword ? Kind::kKeyword : skip("*") ? Kind::kSpread : Kind::kConst;
      if (kind == Kind::kConst && named_before)
        fail("an argument without a name after a named one");
      named_before = named_before || kind != Kind::kConst;
      const std::string_view name = is_keyword ? take().text : "";
      if (is_keyword) take();
      Node argument = expression();
      if (kind != Kind::kConst) {
        argument = make(kind, at, std::move(argument));
        argument.name = name;
      }
      add(call, std::move(argument));
      if (!is(")")) expect(",");
    }
  }

  Node filters(Node e) {
    while (true) {
      if (skip("|"))
        e = filter(std::move(e));
      else if (skip("is"))
        e = test(std::move(e));
      else
        return e;
    }
  }

  Node filter(Node value) {
    Node e = make(Kind::kFilter, peek().at, std::move(value));
    e.name = take_name();
    e.native = find_native(filters_table(), e.name);
    if (is("(")) arguments(e);
    return e;
  }

  Node test(Node value) {
    const size_t at = peek().at;
    const bool negated = skip("not");
    Node e = make(Kind::kTest, at, std::move(value));
    e.name = take_name();
    e.native = find_native(tests_table(), e.name);
    if (is("("))
      arguments(e);
    else if (peek().type == Tok::kConst || is_any({"[", "{"}) ||
             (peek().type == Tok::kName && !is_any({"else", "or", "and", "is"})))
      add(e, postfix(primary()));
    return negated ? make(Kind::kNot, at, std::move(e)) : std::move(e);
  }

  std::vector<Token> tokens_;
  size_t next_ = 0;
  int depth_ = 0;
  int loops_ = 0;  // {% for %} around, within the innermost macro: where {% break %} may stand
  bool mentions_loop_ = false;
  bool has_generation_ = false;
  std::vector<Node> calls_;  // of {% call %}, whose bodies are being parsed
};

const Parser::Keyword Parser::kKeywords[] = {
    {"for", &Parser::for_statement},
    {"if", &Parser::if_statement},
    {"set", &Parser::set_statement},
    {"macro", &Parser::macro_statement},
    {"call", &Parser::call_statement},
    {"filter", &Parser::filter_statement},
    {"generation", &Parser::generation_statement},
    {"break", &Parser::jump_statement<Kind::kBreak>},
    {"continue", &Parser::jump_statement<Kind::kContinue>},
};

Node Parser::statement() {
  const size_t at = peek().at;
  const std::string_view name = take_name();
  for (const Keyword& keyword : kKeywords)
    if (keyword.name == name) return (this->*keyword.parse)(at);
  const bool loads = name == "include" || name == "import" || name == "from" || name == "extends";
  throw Fault(str(loads ? "a chat template cannot load others: " : "unknown tag ", "'", name, "'"),
              at);
}

}  // namespace

void parse(Document& document, TemplateOptions options) {
  Parser parser(document.source, options);
  document.body = parser.document();
  document.has_generation_blocks = parser.has_generation_blocks();
}

}  // namespace cohort::jinja
