// A parser by recursive descent, with Jinja's grammar and precedences.
#include "data/template/parser.h"

#include <algorithm>
#include <initializer_list>

#include "data/template/lexer.h"
#include "data/template/natives.h"
#include "data/utf8.h"

namespace cohort::jinja {
namespace {

struct Constant {
  std::string_view name;
  Value value;
};
const Constant kConstants[] = {{"true", true},   {"True", true},   {"false", false},
                               {"False", false}, {"none", None{}}, {"None", None{}}};

const Constant* find_constant(std::string_view name) {
  const auto* found = std::find_if(std::begin(kConstants), std::end(kConstants),
                                   [&](const Constant& c) { return c.name == name; });
  return found == std::end(kConstants) ? nullptr : found;
}

class Parser {
 public:
  Parser(Document& document, TemplateOptions options)
      : document_(document), tokens_(lex(document.source, options, document.constants)) {}

  void parse() {
    document_.body = located([&] { return peek().at; }, [&] { return statements({}); });
  }

 private:
  using Names = std::initializer_list<std::string_view>;

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
  [[noreturn]] void fail_expecting(const std::string& what) const {
    throw Fault(str("expected ", what, ", got ",
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
    Node node{.kind = kind, .at = static_cast<uint32_t>(at)};
    (add(node, std::move(kids)), ...);
    return node;
  }
  Node named(Kind kind, size_t at, std::string_view name) {
    return {.kind = kind, .at = static_cast<uint32_t>(at), .name = name};
  }
  Node constant(size_t at, Value value) {
    return {.at = static_cast<uint32_t>(at), .value = value};
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
    const Nested nested(document_.constants);
    Node body = make(Kind::kBody, peek().at);
    while (peek().type != Tok::kEnd) {
      const Token& token = take();
      if (token.type == Tok::kData) {
        add(body, constant(token.at, token.text));
      } else if (token.text == "{{") {
        add(body, expressions());
        expect("}}");
      } else if (is_any(ends)) {
        return body;
      } else {
        add(body, statement());
        expect("%}");
      }
    }
    if (ends.size() > 0) throw Fault(str("{% ", *(ends.end() - 1), " %} is missing"));
    return body;
  }

  Node statement();

  // The statements of a tag that is complete but for its '%}'.
  Node block(Names ends) {
    expect("%}");
    return statements(ends);
  }
  // The same, with the end's name passed. {% break %} cannot leave it.
  Node closed_block(std::string_view end) {
    const int loops = std::exchange(loops_, 0);
    Node body = block({end});
    loops_ = loops;
    take();
    return body;
  }

  Node for_statement(size_t at) {
    Node loop = make(Kind::kFor, at, target());
    expect("in");
    add(loop, list_of(&Parser::disjunction));
    add(loop, skip("if") ? expression() : make(Kind::kBody, at));
    ++loops_;
    add(loop, block({"else", "endfor"}));
    --loops_;
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
    if (!is_any({"|", "%}"})) fail_expecting("'='");
    return make(Kind::kSet, at, std::move(to), captured(at, "endset"));
  }

  Node filter_statement(size_t at) { return captured(at, "endfilter"); }

  // What a block prints, through the filters of its tag. They are parsed last, from its body on.
  Node captured(size_t at, std::string_view end) {
    const size_t filters_at = next_;
    while (!is("%}") && peek().type != Tok::kEnd) take();
    Node value = make(Kind::kCapture, at, closed_block(end));
    const size_t after = std::exchange(next_, filters_at);
    if (end == "endfilter") value = filter(std::move(value));
    value = filters(std::move(value));
    if (!is("%}")) fail_expecting("'%}'");
    next_ = after;
    return value;
  }

  Node macro_statement(size_t at) {
    Node name = named(Kind::kName, at, take_name());
    Node macro = named(Kind::kMacro, at, name.name);
    if (!is("(")) fail_expecting("'('");
    parameters(macro);
    add(macro, closed_block("endmacro"));
    return make(Kind::kSet, at, std::move(name), std::move(macro));
  }

  void parameters(Node& macro) {
    if (!skip("(")) return;
    items_until(")", [&] {
      const size_t at = peek().at;
      Node parameter = named(Kind::kName, at, take_name());
      if (skip("=")) add(parameter, expression());
      add(macro, std::move(parameter));
    });
  }

  // A call whose last argument is the block as a macro.
  Node call_statement(size_t at) {
    Node macro = named(Kind::kMacro, at, "caller");
    parameters(macro);
    Node call = expression();
    if (call.kind != Kind::kCall) throw Fault("expected a call in {% call %}", at);
    add(macro, closed_block("endcall"));
    Node caller = make(Kind::kKeyword, at, std::move(macro));
    caller.name = "caller";
    add(call, std::move(caller));
    return call;
  }

  Node generation_statement(size_t at) {
    document_.has_generation_blocks = true;
    return make(Kind::kGeneration, at, closed_block("endgeneration"));
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
    const Nested nested(document_.constants);
    const size_t at = peek().at;
    if (skip("(")) {
      Node inner = target();
      expect(")");
      return inner;
    }
    if (is("loop") || find_constant(peek().text) != nullptr)
      throw Fault(str("nothing can be assigned to '", peek().text, "'"));
    Node name = named(Kind::kName, at, take_name());
    if (!skip(".")) return name;
    Node field = make(Kind::kAttribute, at, std::move(name));
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
    const Nested nested(document_.constants);
    Node e = disjunction();
    while (is("if")) {
      const size_t at = take().at;
      Node condition = disjunction();
      e = make(Kind::kIf, at, std::move(condition), std::move(e),
               skip("else") ? expression() : constant(at, Undefined{"no 'else' was given"}));
    }
    return e;
  }

  Node disjunction() { return operation(Level::kOr); }

  Node operation(Level level) {
    const size_t at = peek().at;
    if (level == Level::kEnd) return filters(unary());
    if (level == Level::kNot && skip("not")) {
      const Nested nested(document_.constants);
      return make(Kind::kNot, at, operation(level));
    }
    const auto next = static_cast<Level>(static_cast<int>(level) + 1);
    Node e = operation(next);
    bool is_chain = false;
    while (true) {
      const bool is_not_in = is("not") && is("in", 1);
      const Operator* op = find_operator(level, is_not_in ? "not in" : peek().text);
      if (op == nullptr) return e;
      if (!std::exchange(is_chain, true)) e = make(Kind::kChain, at, std::move(e));
      Node operand{.kind = Kind::kOperand, .at = static_cast<uint32_t>(peek().at), .op = op};
      next_ += is_not_in ? 2 : 1;
      add(operand, operation(next));
      add(e, std::move(operand));
      e.op = op;
    }
  }

  Node unary() {
    const Nested nested(document_.constants);
    const size_t at = peek().at;
    if (!is_any({"-", "+"})) return postfix(primary());
    const int64_t sign = take().text == "-" ? -1 : 1;
    Node e = make(Kind::kSign, at, unary());
    e.value = sign;
    return e;
  }

  Node primary() {
    const size_t at = peek().at;
    if (peek().type == Tok::kConst) return literal(at);
    if (peek().type == Tok::kName) {
      const std::string_view name = take().text;
      const Constant* known = find_constant(name);
      return known != nullptr ? constant(at, known->value) : named(Kind::kName, at, name);
    }
    Node e = make(Kind::kTuple, at);
    if (skip("(")) {
      if (!is(")")) e = expressions();
      expect(")");
      return e;
    }
    if (skip("[")) {
      e.kind = Kind::kList;
      items_until("]", [&] { add(e, expression()); });
      return e;
    }
    if (!skip("{")) fail_expecting("an expression");
    e.kind = Kind::kDict;
    items_until("}", [&] {
      add(e, expression());
      expect(":");
      add(e, expression());
    });
    return e;
  }

  // A number, or texts side by side, which are one.
  Node literal(size_t at) {
    const Value first = take().value;
    if (!first.is_text() || !peek().value.is_text()) return constant(at, first);
    std::string text(first.text());
    while (peek().value.is_text()) text += take().value.text();
    return constant(at, document_.constants.text(std::move(text)));
  }

  // Items with commas between them, and what closes them.
  template <class TakeItem>
  void items_until(std::string_view end, TakeItem take_item) {
    while (!skip(end)) {
      take_item();
      if (!is(end)) expect(",");
    }
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
          add(e, constant(at, take().value));
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
    items_until(")", [&] {
      const size_t at = peek().at;
      const bool is_keyword = peek().type == Tok::kName && is("=", 1);
      const std::string_view name = is_keyword ? take().text : "";
      const bool is_spread = !is_keyword && skip("*");
      if (is_keyword) take();
      if (named_before && !is_keyword && !is_spread)
        throw Fault("an argument without a name after a named one", at);
      named_before = named_before || is_keyword || is_spread;
      Node argument = expression();
      if (is_keyword || is_spread)
        argument = make(is_keyword ? Kind::kKeyword : Kind::kSpread, at, std::move(argument));
      if (is_keyword) argument.name = name;
      add(call, std::move(argument));
    });
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

  Document& document_;
  std::vector<Token> tokens_;
  size_t next_ = 0;
  int loops_ = 0;  // {% for %} around, within the innermost block that {% break %} cannot leave
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
  Parser(document, options).parse();
}

}  // namespace cohort::jinja
