"""The command line and the self-test of scripts that check the source tree (check_layers.py, check_words.py)."""
import subprocess
import sys
import tempfile
from pathlib import Path


def tracked_files(root):
    """The files that git tracks or would track; in a tree without git, all. Relative to `root`."""
    listing = subprocess.run(["git", "-c", "safe.directory=*", "-C", str(root), "ls-files", "-z", "--cached", "--others",
                              "--exclude-standard"], capture_output=True, text=True)
    names = listing.stdout.split("\0") if listing.returncode == 0 else [
        str(f.relative_to(root)) for f in root.rglob("*")]
    return [Path(name) for name in sorted(filter(None, names)) if (root / name).is_file()]


def self_test(name, check_tree, cases):
    """Checks a temporary tree. `cases`: (file, its text, part of the rule it breaks, or "" for none). A case of a folder
    has None for a text."""
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for file, text, _ in cases:
            if text is None:
                continue
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_text(text, encoding="utf-8")
        problems = check_tree(root)
        for file, _, expected in cases:
            found = [rule for path, _, rule in problems if str(path) == file]
            right = len(found) == 1 and expected in found[0] if expected else not found
            if not right:
                failures.append(f"{file}: expected {expected or 'no report'!r}, got {found}")
    for failure in failures:
        print(f"self-test: {failure}")
    print(f"{name}: self-test of {len(cases)} cases, {len(failures)} failed")
    return 1 if failures else 0


def run(name, usage, check_tree, cases):
    """Runs the script `name` on sys.argv and returns its exit code. check_tree(root) gives (file, line, rule)."""
    arguments = sys.argv[1:]
    if arguments == ["--self-test"]:
        return self_test(name, check_tree, cases)
    if len(arguments) > 1 or (arguments and arguments[0].startswith("-")):
        print(usage.strip(), file=sys.stderr)
        return 0 if arguments in (["--help"], ["-h"]) else 2
    problems = check_tree(Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent)
    for path, line, rule in problems:
        print(f"{path}:{line}: {rule}")
    if not problems:
        print(f"{name}: no rule is broken")
    return 1 if problems else 0
