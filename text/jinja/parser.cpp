// A recursive-descent parser with Jinja's grammar and precedence. It compiles the source to
// closures, so that syntax and semantics of each construct are defined together.
#include <algorithm>
#include <initializer_list>

#include "text/jinja/interpreter.h"
#include "text/jinja/lexer.h"
#include "text/utf8.h"

namespace cohort::jinja {
namespace {

using In = Interpreter;
using Flow = Interpreter::Flow;
using Codes = std::vector<Code>;

const std::pair<std::string_view, Value> kConstants[] = {{"true", true},   {"True", true},
                                                         {"false", false}, {"False", false},
                                                         {"none", None{}}, {"None", None{}}};

std::vector<Value> values_of(In& in, const Codes& codes) {
  std::vector<Value> values;
  for (const Code& code : codes) values.push_back(code(in));
  return values;
}

class Parser {
 public:
  Parser(Document& document, TemplateOptions options)
      : document_(document), tokens_(lex(document.source, options, document.constants)) {}

  void parse() {
    try {
      document_.body = statements({});
    } catch (TemplateError& error) {
      if (error.at == TemplateError::kUnknown) error.at = peek().at;
      throw;
    }
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
  [[noreturn]] void fail_expecting(const std::string& expected) const {
    throw TemplateError(
        str("expected ", expected, ", got ",
            peek().type == Tok::kEnd ? "the end of the template" : excerpt(peek().text)));
  }
  void expect(std::string_view text) {
    if (!skip(text)) fail_expecting(str("'", text, "'"));
  }
  std::string_view take_name() {
    if (peek().type != Tok::kName) fail_expecting("a name");
    return take().text;
  }

  static Code constant(size_t at, Value value) {
    return {at, [=](auto&, auto&) { return value; }};
  }

  // Passes the value of `first` through the steps in order.
  static Code chain(size_t at, Code first, Codes steps) {
    if (steps.empty()) return first;
    return {at, [=](In& in, auto&) {
              Value value = first(in);
              for (const Code& step : steps) value = step(in, value);
              return value;
            }};
  }

  // Statements.

  struct Keyword {
    std::string_view name;
    Code (Parser::*parse)(size_t at);
  };
  static const Keyword kKeywords[];

  // Parses up to a tag in `ends`, whose name is then the next token, or to the end of the template
  // if `ends` is empty.
  Code statements(Names ends) {
    const Nested nested(document_.constants);
    const size_t at = peek().at;
    Codes all;
    while (peek().type != Tok::kEnd) {
      const Token& token = take();
      if (token.type == Tok::kData) {
        all.push_back(constant(token.at, token.text));
      } else if (token.text == "{{") {
        all.push_back(expressions());
        expect("}}");
      } else if (is_any(ends)) {
        break;
      } else {
        all.push_back(statement());
        expect("%}");
      }
    }
    if (ends.size() > 0 && !is_any(ends))
      throw TemplateError(str("{% ", *(ends.end() - 1), " %} is missing"));
    return {at, [=](In& in, auto&) { return in.run(all); }};
  }

  Code statement();

  // Parses the '%}' of the opening tag and the statements of its block.
  Code block(Names ends) {
    expect("%}");
    return statements(ends);
  }
  // A block whose end tag is consumed too. {% break %} cannot leave it.
  Code closed_block(std::string_view end) {
    const int loops = std::exchange(loops_, 0);
    Code body = block({end});
    loops_ = loops;
    take();
    return body;
  }

  Code for_statement(size_t at) {
    For loop{.target = target()};
    expect("in");
    loop.list = list_of(&Parser::disjunction);
    if (skip("if")) loop.condition = expression();
    const bool outside = std::exchange(uses_loop_, false);
    ++loops_;
    loop.body = block({"else", "endfor"});
    --loops_;
    loop.uses_loop = uses_loop_;
    uses_loop_ = uses_loop_ || outside;
    if (skip("else")) loop.otherwise = block({"endfor"});
    take();
    return {at, [=](In& in, auto&) { return in.run_for(loop); }};
  }

  // Conditions, each with the code to run if it holds.
  using Branches = std::vector<std::pair<Code, Code>>;
  static Code choice(size_t at, Branches branches, Code otherwise) {
    return {at, [=](In& in, auto&) {
              for (const auto& [condition, then] : branches)
                if (truthy(condition(in))) return then(in);
              return otherwise(in);
            }};
  }
  static Code no_else(size_t at) { return constant(at, Undefined{"no 'else' was given"}); }

  Code if_statement(size_t at) {
    Branches branches;
    do {
      Code condition = expression();
      branches.emplace_back(std::move(condition), block({"elif", "else", "endif"}));
    } while (skip("elif"));
    Code otherwise = skip("else") ? block({"endif"}) : no_else(at);
    take();
    return choice(at, std::move(branches), std::move(otherwise));
  }

  Code set_statement(size_t at) {
    Code to = target();
    if (!is_any({"=", "|", "%}"})) fail_expecting("'='");
    return assignment(at, std::move(to), skip("=") ? expressions() : captured(at, "endset"));
  }

  static Code assignment(size_t at, Code to, Code value) {
    return {at, [=](In& in, auto&) { return to(in, value(in)); }};
  }

  Code filter_statement(size_t at) { return captured(at, "endfilter"); }

  // The output of a block, passed through the filters of its tag, which precede it.
  Code captured(size_t at, std::string_view end) {
    Codes steps;
    if (end == "endfilter") steps.push_back(filter());
    filters(steps);
    Code value{at, [body = closed_block(end)](In& in, auto&) { return in.capture(body); }};
    return chain(at, std::move(value), std::move(steps));
  }

  Code macro_statement(size_t at) {
    const std::string_view name = take_name();
    if (!is("(")) fail_expecting("'('");
    Macro macro{.name = name, .parameters = parameters(), .body = closed_block("endmacro")};
    return assignment(at, name_target(at, name), function(at, std::move(macro)));
  }

  static Code function(size_t at, Macro macro) {
    return {at, [=](In& in, auto&) { return in.make_macro(macro); }};
  }

  Arguments parameters() {
    Arguments all;
    if (skip("("))
      items_until(")", [&] {
        const std::string_view name = take_name();
        all.push_back({skip("=") ? expression() : Code(), name});
      });
    return all;
  }

  // A call that gets its block as a macro, in the keyword argument `caller`.
  Code call_statement(size_t at) {
    Macro macro{.name = "caller", .parameters = parameters(), .body = {}};
    last_call_ = nullptr;
    Code call = postfix(primary());
    const auto arguments = std::exchange(last_call_, nullptr);
    if (arguments == nullptr || tokens_[next_ - 1].text != ")")
      throw TemplateError("expected a call in {% call %}", at);
    macro.body = closed_block("endcall");
    arguments->push_back({function(at, std::move(macro)), "caller"});
    return call;
  }

  Code generation_statement(size_t at) {
    document_.has_generation_blocks = true;
    return {at, [body = closed_block("endgeneration")](In& in, auto&) {
              return in.run_generation(body);
            }};
  }

  template <Flow flow>
  Code jump_statement(size_t at) {
    if (loops_ == 0)
      throw TemplateError("{% break %} and {% continue %} are allowed inside a {% for %} only", at);
    return {at, [](In& in, auto&) { return in.leave(flow); }};
  }

  // Targets of an assignment: names, fields of namespaces, and tuples of them.
  Code target() {
    const size_t at = peek().at;
    Codes all{target_item()};
    if (!is(",")) return std::move(all[0]);
    while (skip(",") && (peek().type == Tok::kName || is("(")) && !is("in"))
      all.push_back(target_item());
    return {at, [=](In& in, auto& value) {
              const auto& values = items_of(in, value);
              if (values.size() != all.size())
                throw TemplateError(str("expected ", all.size(), " values, got ", values.size()));
              for (size_t i = 0; i < all.size(); ++i) all[i](in, values[i]);
              return Value();
            }};
  }

  Code target_item() {
    const Nested nested(document_.constants);
    const size_t at = peek().at;
    if (skip("(")) {
      Code inner = target();
      expect(")");
      return inner;
    }
    const std::string_view name = take_name();
    if (name == "loop" || find_constant(name) != nullptr)
      throw TemplateError(str("cannot assign to '", name, "'"), at);
    if (!skip(".")) return name_target(at, name);
    return {at, [name, field = take_name()](In& in, auto& value) {
              return in.set_field(in.variable(name), field, value);
            }};
  }

  static Code name_target(size_t at, std::string_view name) {
    return {at, [=](In& in, auto& value) { return in.set(name, value); }};
  }

  // Expressions, from the lowest precedence to the highest.

  Code expressions() { return list_of(&Parser::expression); }

  // One expression, or a tuple if commas follow.
  Code list_of(Code (Parser::*parse)()) {
    const size_t at = peek().at;
    Codes items{(this->*parse)()};
    if (!is(",")) return std::move(items[0]);
    while (skip(",") && !is_any({")", "}}", "%}"})) items.push_back((this->*parse)());
    return list(at, std::move(items), Flavor::kTuple);
  }
  static Code list(size_t at, Codes items, Flavor flavor) {
    return {at, [=](In& in, auto&) { return in.list(values_of(in, items), flavor); }};
  }

  Code expression() {
    const Nested nested(document_.constants);
    Code e = disjunction();
    const size_t at = peek().at;
    if (!skip("if")) return e;
    Branches branches(1);
    branches[0] = {disjunction(), std::move(e)};
    return choice(at, std::move(branches), skip("else") ? expression() : no_else(at));
  }

  Code disjunction() { return operation(Level::kOr); }

  Code operation(Level level) {
    const size_t at = peek().at;
    if (level == Level::kComparison) return comparison();
    if (level == Level::kEnd) return operand();
    const auto next = static_cast<Level>(static_cast<int>(level) + 1);
    if (level == Level::kNot && skip("not")) {
      const Nested nested(document_.constants);
      return negation(at, operation(level));
    }
    Code first = operation(next);
    Codes steps;
    while (true) {
      const size_t op_at = peek().at;
      const Operator* op = take_operator(level);
      if (op == nullptr) return chain(at, std::move(first), std::move(steps));
      steps.emplace_back(op_at, [op, right = operation(next)](In& in, auto& left) {
        if (op->apply != nullptr) return op->apply(in, left, right(in));
        return truthy(left) == (op->level == Level::kOr) ? left : right(in);
      });
    }
  }

  const Operator* take_operator(Level level) {
    const bool is_not_in = is("not") && is("in", 1);
    const Operator* op = find_operator(level, is_not_in ? "not in" : peek().text);
    if (op != nullptr) next_ += is_not_in ? 2 : 1;
    return op;
  }

  static Code negation(size_t at, Code e) {
    return {at, [=](In& in, auto& left) { return !truthy(e(in, left)); }};
  }

  // a < b < c is true if all hold. Operands are evaluated once, up to the first failure.
  Code comparison() {
    const Level next = Level::kSum;
    Code first = operation(next);
    const size_t at = peek().at;
    std::vector<std::pair<const Operator*, Code>> rest;
    while (const Operator* op = take_operator(Level::kComparison))
      rest.emplace_back(op, operation(next));
    if (rest.empty()) return first;
    return {at, [=](In& in, auto&) {
              Value left = first(in), result;
              for (const auto& [op, operand] : rest) {
                const Value right = operand(in);
                result = op->apply(in, left, right);
                if (!truthy(result)) break;
                left = right;
              }
              return result;
            }};
  }

  Code operand() {
    const size_t at = peek().at;
    Code first = unary();
    Codes steps;
    filters(steps);
    return chain(at, std::move(first), std::move(steps));
  }

  Code unary() {
    const Nested nested(document_.constants);
    const size_t at = peek().at;
    if (!is_any({"-", "+"})) return postfix(primary());
    const Value sign = take().text == "-" ? -1 : 1;
    return {at, [sign, e = unary()](In& in, auto&) {
              const Value value = e(in);
              checked(value, value.is_number(), "a number");
              return operate(in, Level::kProduct, "*", sign, value);
            }};
  }

  Code primary() {
    const size_t at = peek().at;
    if (peek().type == Tok::kConst) return literal(at);
    if (peek().type == Tok::kName) {
      const std::string_view name = take().text;
      uses_loop_ = uses_loop_ || name == "loop";
      if (const Value* known = find_constant(name)) return constant(at, *known);
      return {at, [=](In& in, auto&) { return in.variable(name); }};
    }
    Codes items;
    const auto add = [&] { items.push_back(expression()); };
    if (skip("(")) {
      if (skip(")")) return list(at, {}, Flavor::kTuple);
      Code inner = expressions();
      expect(")");
      return inner;
    }
    if (skip("[")) {
      items_until("]", add);
      return list(at, std::move(items), Flavor::kList);
    }
    if (!skip("{")) fail_expecting("an expression");
    items_until("}", [&] {
      add();
      expect(":");
      add();
    });
    return {at, [=](In& in, auto&) {
              const std::vector<Value> values = values_of(in, items);
              Entries entries;
              for (size_t i = 0; i < values.size(); i += 2)
                set_entry(in, entries, values[i], values[i + 1]);
              return in.dict(std::move(entries));
            }};
  }

  static const Value* find_constant(std::string_view name) {
    for (const auto& [known, value] : kConstants)
      if (known == name) return &value;
    return nullptr;
  }

  // A number or a text; adjacent texts are concatenated.
  Code literal(size_t at) {
    const Value first = take().value;
    if (!first.is_text() || !peek().value.is_text()) return constant(at, first);
    std::string text(first.text());
    while (peek().value.is_text()) text += take().value.text();
    return constant(at, document_.constants.text(std::move(text)));
  }

  // Items separated by commas, and the closing token.
  template <class TakeItem>
  void items_until(std::string_view end, TakeItem take_item) {
    while (!skip(end)) {
      take_item();
      if (!is(end)) expect(",");
    }
  }

  Code postfix(Code first) {
    const size_t begin = peek().at;
    Codes steps;
    while (true) {
      const size_t at = peek().at;
      if (is("("))
        steps.push_back(call(at));
      else if (skip("["))
        steps.push_back(subscript(at));
      else if (skip("."))
        steps.push_back(field(at));
      else
        return chain(begin, std::move(first), std::move(steps));
    }
  }

  Code call(size_t at) {
    const auto all = std::make_shared<Arguments>(arguments());
    last_call_ = all;
    return {at, [=](In& in, auto& left) { return in.call(left, in.evaluate(*all)); }};
  }

  Code field(size_t at) {
    if (peek().type == Tok::kConst)
      return {at, [key = take().value](In& in, auto& left) { return in.item(left, key); }};
    return {at, [name = take_name()](In& in, auto& left) { return in.attribute(left, name); }};
  }

  Code subscript(size_t at) {
    Codes parts;
    do parts.push_back(is_any({":", "]"}) ? constant(at, None{}) : expression());
    while (parts.size() < 3 && skip(":"));
    expect("]");
    if (parts.size() == 1)
      return {at,
              [key = std::move(parts[0])](In& in, auto& left) { return in.item(left, key(in)); }};
    parts.resize(3, constant(at, None{}));
    return {at, [=](In& in, auto& left) {
              return slice(in, left, {parts[0](in), parts[1](in), parts[2](in)});
            }};
  }

  Arguments arguments() {
    Arguments all;
    expect("(");
    items_until(")", [&] {
      const bool is_keyword = peek().type == Tok::kName && is("=", 1);
      const std::string_view name = is_keyword ? take().text : "";
      const bool spread = !is_keyword && skip("*");
      if (is_keyword) take();
      if (!is_keyword && !spread && !all.empty() && !all.back().name.empty())
        throw TemplateError("a positional argument follows a named one", peek().at);
      all.push_back({expression(), name, spread});
    });
    return all;
  }

  void filters(Codes& steps) {
    while (true) {
      if (skip("|"))
        steps.push_back(filter());
      else if (skip("is"))
        steps.push_back(test());
      else
        return;
    }
  }

  Code filter() {
    const size_t at = peek().at;
    const std::string_view name = take_name();
    return native(at, find_native(kFilterTable, name), str("filter '", name, "'"),
                  is("(") ? arguments() : Arguments());
  }

  Code test() {
    const size_t at = peek().at;
    const bool negated = skip("not");
    const std::string_view name = take_name();
    Arguments all;
    if (is("("))
      all = arguments();
    else if (peek().type == Tok::kConst || is_any({"[", "{"}) ||
             (peek().type == Tok::kName && !is_any({"else", "or", "and", "is"})))
      all.push_back({postfix(primary())});
    Code e = native(at, find_native(kTestTable, name), str("test '", name, "'"), std::move(all));
    return negated ? negation(at, std::move(e)) : std::move(e);
  }

  // An unknown filter or test is an error only when it is evaluated.
  static Code native(size_t at, const Native* native, std::string description, Arguments all) {
    return {at, [=](In& in, auto& left) {
              if (native == nullptr) throw TemplateError("there is no " + description);
              return in.call_native(*native, left, in.evaluate(all));
            }};
  }

  Document& document_;
  std::vector<Token> tokens_;
  size_t next_ = 0;
  bool uses_loop_ = false;  // the enclosing {% for %} has used the name `loop` so far
  std::shared_ptr<Arguments> last_call_;
  int loops_ = 0;  // enclosing {% for %} that {% break %} can leave
};

const Parser::Keyword Parser::kKeywords[] = {
    {"for", &Parser::for_statement},
    {"if", &Parser::if_statement},
    {"set", &Parser::set_statement},
    {"macro", &Parser::macro_statement},
    {"call", &Parser::call_statement},
    {"filter", &Parser::filter_statement},
    {"generation", &Parser::generation_statement},
    {"break", &Parser::jump_statement<Flow::kBreak>},
    {"continue", &Parser::jump_statement<Flow::kContinue>},
};

Code Parser::statement() {
  const size_t at = peek().at;
  const std::string_view name = take_name();
  for (const Keyword& keyword : kKeywords)
    if (keyword.name == name) return (this->*keyword.parse)(at);
  const bool loads = name == "include" || name == "import" || name == "from" || name == "extends";
  throw TemplateError(
      str(loads ? "a chat template cannot load others: " : "unknown tag ", "'", name, "'"), at);
}

}  // namespace

void parse(Document& document, TemplateOptions options) {
  Parser(document, options).parse();
}

}  // namespace cohort::jinja
