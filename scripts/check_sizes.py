#!/usr/bin/env python3
"""Checks sizes: the budgets of the table "Budgets" in ARCHITECTURE.md (code lines and public names of each folder,
thread-local modes, words of Markdown), and that no function has more than 60 code lines and no public function more
than 6 parameters. Code lines are lines that are neither blank nor comment alone. Public names are the distinct names
of functions, types, constants and macros that a folder's headers declare outside of classes. Words are counted in all
Markdown but CHANGELOG.md.

  scripts/check_sizes.py [ROOT]       checks the tree (default: the one this script lies in)
  scripts/check_sizes.py --measure    prints the table with the tree's present sizes
  scripts/check_sizes.py --self-test  breaks every rule in a temporary tree and expects a report
"""
import re
import sys
from pathlib import Path

import tree_check

MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6
FOLDERS = ["core", "sys", "config", "kernels", "text", "data", "autograd", "nn", "rl/engine", "distributed", "rl",
           "trainers", "job", "apps", "python"]
HEADERS = {".h", ".cuh"}
SOURCES = HEADERS | {".cpp", ".cu", ".py"}
ADVICE = "remove as many as you add; where the change's issue allows more, raise the row and say so in the change"

# Cells of a row for several folders.
BUDGET = re.compile(r"\| ([\w/]+) \| ([\d,]+) \| ([\d,]+)(?= \|)")
BUDGET_OF_TREE = re.compile(r"\| (thread-local modes|Markdown words) \| ([\d,]+)(?= \|)")

# What the scanner sees: comments and text become blanks, and so do preprocessor lines.
BLANKED = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![\w])\'(?:\\.|[^\'\\\n])+\'|^[ \t]*#(?:\\\n|[^\n])*',
    re.S | re.M)
TYPE = re.compile(r"(?:^|[\s>])(?:struct|class|union|enum(?:\s+class)?)\s+(?:alignas\([^)]*\)\s*)?(\w+)")
ATTRIBUTES = re.compile(r"\[\[[^\]]*\]\]|alignas\s*\([^()]*\)|__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)|"
                        r"requires\s+[\w:]+(?:<[^{};]*?>)?(?=\s)|decltype\s*\((?:[^()]|\([^()]*\))*\)")
FUNCTION = re.compile(r"((?:~|operator\s*(?:[^\s\w(]+|\(\)|\w+))?[\w]*)\s*\($")
MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.M)
CONSTANT = re.compile(r"\bconstexpr\b[^=({]*?(\w+)(?:\[[^\]]*\])*\s*(?:=|\{|$)")
DECLARES = "COHORT_KERNEL("  # around a function's declaration
ALIAS = re.compile(r"\busing\s+(\w+)\s*=")


def without_templates(text):
    """A declaration without the arguments of its leading template<...>."""
    text = text.lstrip()
    while text.startswith("template"):
        depth = 0
        for i in range(text.index("<"), len(text)):
            depth += {"<": 1, ">": -1}.get(text[i], 0)
            if depth == 0:
                break
        text = text[i + 1:].lstrip()
    return text


def first_call(text):
    """(name, parameter list) of the first parenthesis outside <...>, or None."""
    depth = 0
    for i, c in enumerate(text):
        if c == "<" and re.search(r"[\w:]\s*$", text[:i]) and "operator" not in text[max(0, i - 10):i]:
            depth += 1
        elif c == ">" and depth:
            depth -= 1
        elif c == "(" and depth == 0:
            name = FUNCTION.search(text[:i + 1])
            level, end = 0, i
            for end in range(i, len(text)):
                level += {"(": 1, ")": -1}.get(text[end], 0)
                if level == 0:
                    break
            if name and name[1].strip().startswith("operator") and text[i + 1:end].strip() == "":
                rest = first_call(text[end + 1:])  # operator()(...)
                return (name[1].strip(), rest[1]) if rest else (name[1].strip(), "")
            return (name[1].strip() if name else ""), text[i + 1:end]
    return None


def count_parameters(parameters):
    """Number of top-level commas plus one; 0 for an empty list."""
    if parameters.strip() in ("", "void"):
        return 0
    depth = commas = 0
    for c in parameters:
        if c in "([{<":
            depth += 1
        elif c in ")]}>":
            depth -= 1
        elif c == "," and depth == 0:
            commas += 1
    return commas + 1


class Scanner:
    """The declarations and function bodies of one file outside of function bodies."""

    def __init__(self, text):
        self.lines = text.splitlines()
        self.text = BLANKED.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
        self.functions = []  # (name, first line, code lines)
        self.declared = []  # (name, parameters, line, is_public) of functions
        self.names = set()  # at namespace scope
        self.scan()
        self.names.update(MACRO.findall(text))

    def line_at(self, position):
        return self.text.count("\n", 0, position) + 1

    def code_lines(self, begin, end):
        lines = self.lines[self.line_at(begin) - 1:self.line_at(end)]
        return sum(1 for line in lines if line.strip() and not line.strip().startswith("//"))

    def match(self, opening):
        """Position of the brace that closes the one at `opening`."""
        depth = 0
        for i in range(opening, len(self.text)):
            depth += {"{": 1, "}": -1}.get(self.text[i], 0)
            if depth == 0:
                return i
        return len(self.text) - 1

    def declaration(self, text, begin, scopes):
        """Records a declaration that ends in ';' or before a body. True if it is a function's."""
        clean = without_templates(ATTRIBUTES.sub(" ", text)).strip()
        if clean.startswith(DECLARES):
            clean = clean[len(DECLARES):-1]
        in_class = scopes[-1][0] == "class"
        hidden = any(kind == "hidden" for kind, _ in scopes)
        if not clean or clean.startswith(("friend ", "static_assert", "using namespace", "extern \"")):
            return False
        head = re.split(r"(?<![=!<>])=(?!=)", clean)[0] if "operator" not in clean else clean
        alias, kind = ALIAS.search(clean), TYPE.match(clean)
        call = None if alias or re.match(r"(?:struct|class|union|enum)\b", clean) else first_call(head)
        if call and call[0] and call[0] not in ("alignas", "asm", "if", "while", "for"):
            public = not hidden and all(access == "public" for kind, access in scopes if kind == "class")
            self.declared.append((call[0], count_parameters(call[1]), self.line_at(begin), public))
            if not in_class and not hidden:
                self.names.add(call[0])
            return True
        if in_class or hidden:
            return False
        name = alias or kind or CONSTANT.search(clean)
        if name:
            self.names.add(name[1])
        return False

    def scan(self):
        scopes, begin, i, parens = [("namespace", "public")], 0, 0, 0
        while i < len(self.text):
            c = self.text[i]
            chunk = self.text[begin:i]
            if c in "()":
                parens += 1 if c == "(" else -1
            elif parens > 0 and c == "{":  # a braced argument
                i = self.match(i)
            elif c == ";":
                self.declaration(chunk, self.start(begin), scopes)
                begin = i + 1
            elif c == ":" and scopes[-1][0] == "class" and chunk.strip() in ("public", "private", "protected"):
                scopes[-1] = ("class", chunk.strip())
                begin = i + 1
            elif c == "}":
                if len(scopes) > 1:
                    scopes.pop()
                begin = i + 1
            elif c == "{":
                i, begin = self.open(chunk, begin, i, scopes)
            i += 1

    def start(self, begin):
        """Position of the first character of a declaration."""
        return begin + len(self.text[begin:]) - len(self.text[begin:].lstrip())

    def open(self, chunk, begin, brace, scopes):
        """Enters a namespace or class, or skips a body. Returns the position to continue after, and `begin`."""
        clean = without_templates(ATTRIBUTES.sub(" ", chunk)).strip()
        first = self.start(begin)
        if re.match(r"(?:inline\s+)?namespace\b", clean) or clean.startswith("extern"):
            name = clean.split()[-1]
            scopes.append(("hidden" if name in ("namespace", "detail") else "namespace", "public"))
            return brace, brace + 1
        end = self.match(brace)
        if re.match(r"(?:struct|class|union)\b", clean) and "(" not in clean:
            self.declaration(chunk, first, scopes)
            scopes.append(("class", "private" if clean.startswith("class") else "public"))
            return brace, brace + 1
        initializer = re.search(r"\)\s*(?:noexcept\s*)?:(?!:)", clean)
        if initializer and re.search(r"[\w>]$", clean) and not re.search(r"\b(?:const|noexcept|override)$", clean):
            return end, begin  # a member's initializer in braces
        if re.search(r"=\s*$|\breturn$", clean) or re.match(r"enum\b", clean) or "(" not in clean:
            return end, begin  # an initial value, or enumerators; the declaration ends at ';'
        if self.declaration(chunk, first, scopes):
            self.functions.append((self.declared[-1][0], self.line_at(first), self.code_lines(first, end)))
            return end, end + 1
        return end, begin


def files_of(root, name):
    folder = root / name
    inner = [root / other for other in FOLDERS if other.startswith(name + "/")]
    return sorted(f for f in folder.rglob("*") if f.suffix in SOURCES and f.is_file()
                  and not any(f.is_relative_to(other) for other in inner))


def measure(root):
    """Per folder (code lines, public names), the thread-local modes and the broken rules of functions."""
    folders, modes, problems = {}, [], []
    for folder in FOLDERS:
        lines, names = 0, set()
        for file in files_of(root, folder):
            path = file.relative_to(root)
            text = file.read_text(encoding="utf-8")
            code = [line.strip() for line in text.splitlines()]
            lines += sum(1 for line in code if line and not line.startswith("#" if file.suffix == ".py" else "//"))
            if file.suffix == ".py":
                continue
            modes += [(path, number) for number, line in enumerate(code, 1)
                      if re.match(r"(?:static |inline )*thread_local\b", line)]
            scan = Scanner(text)
            for name, line, length in scan.functions:
                if length > MAX_FUNCTION_LINES:
                    problems.append((path, line, f"{name}() has {length} code lines: at most {MAX_FUNCTION_LINES}"))
            if file.suffix not in HEADERS:
                continue
            names |= scan.names
            for name, parameters, line, public in scan.declared:
                if public and parameters > MAX_PARAMETERS:
                    problems.append((path, line, f"{name}() has {parameters} parameters: at most {MAX_PARAMETERS}"))
        if lines:
            folders[folder] = (lines, len(names))
    return folders, modes, problems


def words_of_markdown(root):
    """Words by page."""
    pages = [path for path in tree_check.tracked_files(root) if path.suffix == ".md" and path.name != "CHANGELOG.md"]
    return {path: len((root / path).read_text(encoding="utf-8").split()) for path in pages}


def check_tree(root):
    """All broken rules, as (file, line, rule)."""
    folders, modes, problems = measure(root)
    page = Path("ARCHITECTURE.md")
    text = (root / page).read_text(encoding="utf-8")
    number = lambda digits: int(digits.replace(",", ""))
    budgets = {m[1]: (number(m[2]), number(m[3])) for m in BUDGET.finditer(text)}
    of_tree = {m[1]: number(m[2]) for m in BUDGET_OF_TREE.finditer(text)}
    for folder, (lines, names) in folders.items():
        if folder not in budgets:
            problems.append((page, 1, f"the table of budgets has no row for {folder}"))
            continue
        if lines > budgets[folder][0]:
            problems.append((Path(folder), 1, f"{lines} code lines: the budget in {page} is {budgets[folder][0]}; {ADVICE}"))
        if names > budgets[folder][1]:
            problems.append((Path(folder), 1, f"{names} public names: the budget in {page} is {budgets[folder][1]}; {ADVICE}"))
    if len(modes) > of_tree.get("thread-local modes", 0):
        rule = f"{len(modes)} thread-local modes: the budget in {page} is {of_tree.get('thread-local modes', 'missing')}"
        problems += [(*place, rule) for place in modes[-1:]]
    words = sum(words_of_markdown(root).values())
    if words > of_tree.get("Markdown words", 0):
        rule = f"{words} words of Markdown: the budget in {page} is {of_tree.get('Markdown words', 'missing')}; {ADVICE}"
        problems.append((Path("docs"), 1, rule))
    return problems


def print_table(root):
    folders, modes, _ = measure(root)
    for folder, (lines, names) in folders.items():
        print(f"| {folder} | {lines:,} | {names} |")
    print(f"| thread-local modes | {len(modes)} |")
    print(f"| Markdown words | {sum(words_of_markdown(root).values()):,} |")
    print(f"{sum(lines for lines, _ in folders.values()):,} code lines")


PAGE = ("| core | 70 | 4 | sys | 3 | 9 |\n| nn | 99 | 1 |\n| rl | 99 | 99 |\n| rl/engine | 99 | 99 |\n| data | 999 | 99 |\n"
        "| python | 2 | 0 |\n| thread-local modes | 1 | Markdown words | 60 |\n")
LONG = "  x += 1;\n  // A comment is no code.\n\n"
# (file, its text, part of the rule it breaks); "" for a file that breaks none; None for the text of a folder.
SELF_TEST = [
    ("ARCHITECTURE.md", PAGE, "the table of budgets has no row for text"),
    ("core/a.h", "#pragma once\n#define M(x) \\\n  f(x)\nint f(int a, int b = g(1, 2), int c = {1}, int d, int e, int g);\n"
                 "struct S {\n  S();\n  int t(int);\n};\nnamespace detail {\nint hidden(int);\n}\n", ""),
    ("core/a.cpp", "void f(int x) {\n" + LONG * 58 + "}\n", ""),
    ("core", None, "71 code lines: the budget in ARCHITECTURE.md is 70"),
    ("sys/a.h", "void f() {\n}\n// No code.\n", ""),
    ("nn/a.h", "struct A {};\nconstexpr int kB = 2;\n", ""),
    ("nn", None, "2 public names: the budget in ARCHITECTURE.md is 1"),
    ("rl/a.h", "void g(std::map<int, int> a, int b, int c, int d, int e, int f);\n", ""),
    ("rl/b.h", "void g(int a, int b, int c, int d, int e, int f, int h);\n", "g() has 7 parameters: at most 6"),
    ("rl/c.h", "class C {\n public:\n  C(int a, int b, int c, int d, int e, int f, int h) : a_{a}, b_(b) {}\n"
               "  int a_, b_;\n};\n", "C() has 7 parameters"),
    ("rl/f.h", "COHORT_KERNEL(void g(int a, int b, int c, int d, int e, int f, int h));\n", "g() has 7 parameters"),
    ("rl/d.h", "class C {\n  void p(int a, int b, int c, int d, int e, int f, int h);\n};\n", ""),
    ("rl/e.cpp", "void g(int a, int b, int c, int d, int e, int f, int h) {}\n", ""),
    ("rl/engine/a.cpp", "thread_local int t_one = 0;\n", ""),
    ("rl/engine/b.cpp", "static thread_local int t_two = 0;\n", "2 thread-local modes"),
    ("data/long.cpp", "namespace a {\nclass B {\n  int f(int x) const {\n" + LONG * 59 + "  }\n};\n}\n",
     "f() has 61 code lines: at most 60"),
    ("data/long2.cpp", "template <class T>\nvoid T::g(int x)\n    : a_{1} {\n" + LONG * 57 + "}\n", "g() has 61 code lines"),
    ("data/table.cpp", "const int kTable[] = {\n" + "  1,\n" * 80 + "};\nauto s = R\"(\nvoid f() {\n" + "x\n" * 70 + "}\n)\";\n",
     ""),
    ("text/a.h", "#pragma once\n", ""),
    ("python/a.py", "# A comment.\nimport os\nimport re\n\nx = 1\n", ""),
    ("python", None, "3 code lines: the budget in ARCHITECTURE.md is 2"),
    ("docs/a.md", "one two\n" * 10, ""),
    ("CHANGELOG.md", "one two\n" * 100, ""),
    ("docs", None, "words of Markdown: the budget in ARCHITECTURE.md is 60"),
]


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        sys.exit(print_table(Path(__file__).resolve().parent.parent))
    sys.exit(tree_check.run("check_sizes", __doc__, check_tree, SELF_TEST))
