#!/usr/bin/env python3
"""Checks the vocabulary of the source tree. Refuses words that stand for a term of the field (the term is printed), and
comments that open with a dangling phrase instead of a sentence. Prints file:line and the broken rule. docs/notation.md
has the glossary.

  scripts/check_words.py [ROOT]       checks the tree (default: the one this script lies in)
  scripts/check_words.py --self-test  breaks every rule in a temporary tree and expects a report
"""
import re
import sys
from pathlib import Path

import tree_check

# A refused word -> the term to use. Words are compared without case, separators and CamelCase boundaries: "copy engine"
# finds copy_engine and CopyEngine as well. A word stands here only if it has no other proper sense in this tree.
REFUSED = {
    "copy engine": "TMA",
    "beside previous": "programmatic dependent launch",
    "let next start": "launch_dependent_grids()",
    "along rows": "K-major",
    "across rows": "MN-major",
    "wgmma factor": "matrix descriptor",
    "early reads": "prefetch",
    "draw params": "SamplingParams",
    "drawn token": "sampled token",
    "drawn tokens": "sampled tokens",
    "append drawn": "append_sampled",
    "joined chunks": "combined chunks",
    "join chunk": "combine_chunk",
    "forward learned": "hidden_at_targets",
    "learned tokens": "target positions, or loss tokens",
    "make room": "grow, or free",
    "has room for": "fits",
    "prompt share": "prompt shard",
    "rank share": "rank shard",
    "take up": "resume",
    "takes up": "resumes",
    "put back": "preempt",
    "drop prompt": "free the prompt",
    "leave cache": "free the sequence",
    "lend": "release",
    "lends": "releases",
    "lent": "released",
    "mended": "corrected, or repaired",
    "told": "reported",
    "dealt": "shuffled",
    "doubt": "warning",
    "doubts": "warnings",
    "silent group": "zero-variance group",
    "silent groups": "zero-variance groups",
    "look at reward": "check_reward",
    "note score": "record_score",
    "expectation missed": "invalid_reason",
    "stranger": "unknown peer",
    "strangers": "unknown peers",
    "turn away": "reject",
    "greet": "handshake",
    "good order": "clean exit",
    "for ever": "forever",
    "in vain": "without success",
    "nobody": "no one, or the passive voice",
    "somebody": "a noun",
    "whoever": "a noun",
    "goes on": "continues",
    "go on": "continue",
    "people": "human-readable, or users",
}

# Comments that open so are fragments: a sentence, or the name of the variable, says the same.
FRAGMENT = re.compile(r"//[/!]?\s*(What|Of|Whether|Where|The same|How|Which|Those)\b")
TRAILING_FRAGMENT = re.compile(r"\S.*//\s*of\b")

SOURCES = {".h", ".cpp", ".cu", ".cuh"}
TEXTS = SOURCES | {".md", ".py", ".sh", ".yaml", ".html", ".txt", ".cmake", ".in"}
# This list itself, the page that records former names, and data of tests.
EXEMPT = ["scripts/check_words.py", "CHANGELOG.md", "tests/reference/", "bench/results/"]
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def words(line):
    """The words of a line of code or prose, identifiers taken apart, in small letters."""
    return " " + " ".join(w.lower() for w in WORD.findall(line)) + " "


PATTERN = re.compile(" (" + "|".join(sorted(map(re.escape, REFUSED), key=len, reverse=True)) + ") ")


def files_of(root):
    for path in tree_check.tracked_files(root):
        if path.suffix in TEXTS and not any(str(path).startswith(e) for e in EXEMPT):
            yield path


def check_line(path, line, opens_block):
    """The rules that a line breaks."""
    rules = [f'"{m}": say {REFUSED[m]}' for m in PATTERN.findall(words(line))]
    if path.suffix in SOURCES:
        if opens_block and (match := FRAGMENT.match(line.strip())):
            rules.append(f'a comment opens with the fragment "{match[1]}": write a sentence or a term')
        if not line.strip().startswith("//") and TRAILING_FRAGMENT.search(line):
            rules.append('a trailing comment "of ...": let the name say it')
    return rules


def check_tree(root):
    """All broken rules, as (file, line, rule)."""
    problems = []
    for path in files_of(root):
        in_block = False
        for number, line in enumerate((root / path).read_text(encoding="utf-8").splitlines(), 1):
            is_comment = line.strip().startswith("//")
            problems += [(path, number, rule) for rule in check_line(path, line, is_comment and not in_block)]
            in_block = is_comment
    return problems


# (file, its text, part of the rule it breaks); "" for a file that breaks none.
SELF_TEST = [
    ("core/a.h", "// Loads a tile by TMA.\nint people_mover;\n", '"people": say human-readable'),
    ("core/b.h", "// The draw of a random number, a turn of a conversation, the sum of a row.\n", ""),
    ("core/c.h", "// Stops.\n// What follows is the second line of a sentence.\nint x;\n", ""),
    ("core/d.h", "// What a step costs.\nint x;\n", 'the fragment "What"'),
    ("core/e.h", "int part;  // of the warp's\n", 'trailing comment "of ..."'),
    ("core/f.h", "int kBesidePrevious;\n", '"beside previous": say programmatic dependent launch'),
    ("core/g.h", "int copy_engine;\n", '"copy engine": say TMA'),
    ("core/h.h", "// The same for f32.\n", 'the fragment "The same"'),
    ("docs/a.md", "What a step costs, and whom it is told.\n", '"told": say reported'),
    ("docs/b.md", "What a step costs.\n", ""),
    ("scripts/a.py", "# It goes on.\n", '"goes on": say continues'),
    ("tests/a_test.cpp", "TEST(Runs, AreMended) {}\n", '"mended": say corrected'),
    ("README.md", "It waits for ever.\n", '"for ever": say forever'),
    ("tests/reference/a.txt", "people\n", ""),
    ("CHANGELOG.md", "Renamed lend().\n", ""),
]

if __name__ == "__main__":
    sys.exit(tree_check.run("check_words", __doc__, check_tree, SELF_TEST))
