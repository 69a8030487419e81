#!/usr/bin/env python3
"""Checks the answers of scripts/cohort_sandbox.py to solutions, tests and programs of all kinds, in the tiers that work here."""
import json
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


def asserts(*tests, **more):
    return {"test_list": list(tests), **more}


def pairs(inputs, outputs, **more):
    return {"inputs": inputs, "outputs": outputs, **more}


def check(*tests):
    return {"test": "def check(candidate):\n" + "".join(f"    {test}\n" for test in tests), "entry_point": "f"}


# Code in a block, or a completion that has one; fields; the reward, or "error"; the outcome unless it is that of the reward.
CASES = [
    ('def f(x): return x, x+1', pairs([[0], [2]], [[0, 1], [2, 3]], fn_name='f'), 1),
    ('def f(x): return x', pairs([[0], [2]], [[0, 1], [2, 3]], fn_name='f'), 0),
    ('raise ValueError', pairs([[0]], [[0]], fn_name='f'), 0),
    ('1. x\n   ```python\n   def f(x):\n       return x\n   ```\n', asserts('assert f(1)==1'), 1),
    ('~~~~\ndef f(x): return x\n```\n~~~~', asserts('assert f(1)==1'), 0),
    ('def sum(a,b): return 6', asserts('assert sum(10,15)==6'), 1),
    ('def abs(x): return 0\ndef f(x): return 9', asserts('assert abs(f(1)-1)<1e-3'), 0),
    ('x = 1', asserts('assert sum([1,2])==3'), 0),
    ('def sum(a): return 1,', asserts('assert set(sum([1,2]))=={1}'), 1),
    ('def sum(a): return 1\ndef abs(a): return 0', asserts('assert abs(sum([1])-5)==0'), 'error'),
    ('def f(x): return x/3', asserts('assert math.isclose(f(1),1/3)'), 1),
    ('class math:\n    isclose=lambda *a: True\ndef f(x): return 5', asserts('assert math.isclose(f(1),1/3)'), 0),
    ('def f(x): return x/3', asserts('assert f(3)==1', test_setup_code='import nonexist'), 'error'),
    ('import nonexist\ndef f(x): return x/3', asserts('assert f(3)==1'), 0),
    ('def f(x): return x/3', asserts('assert f(3)==='), 'error'),
    ('def f(x): return x/3', asserts("print('x'*100); assert f(3)==1"), 1),
    ('def f(x): raise KeyError(x)', asserts('try:\n f(1)\n assert 0\nexcept KeyError: pass'), 1),
    ("def f(x): return [float('inf'), -float('inf')]", asserts("assert f(1)==[float('inf'),-float('inf')]"), 1),
    ('import math\ndef f(x): return math.factorial(3000)', asserts('import math\nassert f(1)==math.factorial(3000)'), 1),
    ('from collections import Counter\ndef f(x): return Counter(x)', asserts("assert f('aab')==Counter('aab')"), 1),
    ('import sys\nfor l in sys.stdin: print(int(l)*2)', pairs(['1\n2\n'], ['2\n4\n']), 1),
    ('print(open(0).read())', pairs(['ab'], ['ab']), 1),
    ('print(open(0).read())', pairs(['ab', 'cd', 'e'], ['ab', 'cd', 'e']), 1),
    ('print(input())', pairs([str(i) for i in range(60)], [str(i) for i in range(60)]), 1),
    ('import tempfile\ndef f(x): return tempfile.NamedTemporaryFile(delete=False).write(x)', asserts("assert f(b'abc') == 3"), 1),
    ('print(input());exit()', pairs(['ab'], ['ab']), 1),
    ("def main(): print(input())\nif __name__=='__main__': main()", pairs(['ab', 'c'], ['ab', 'c']), 1),
    ('import sys,threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1<<26)\ndef main(): print(input())\nthreading.Thread(target=main).start()', pairs(['ab', 'c'], ['ab', 'c']), 1),
    ('class Solution:\n    def g(self,a): return a+1', {'test': 'def check(candidate):\n    assert candidate(a=1)==2', 'entry_point': 'Solution().g'}, 1),
    ('from dataclasses import dataclass\n@dataclass\nclass A:\n    x:int\ndef f(x): return A(x).x', asserts('assert f(1)==1'), 1),
    ('def f(g): return g(1)', asserts('assert f(lambda x:x)==1'), 'error'),
    ('def f(x): return 5', asserts('f(1) == 1'), 'error'),
    ('def f(x): return 5', asserts('', '# assert f(1) == 1'), 'error'),
    ('def f(x): return 5', asserts('print(f(1) == 1)', 'y = f(1)'), 'error'),
    ('def f(x): return 5', asserts('def test_f():\n    assert f(1) == 1'), 'error'),
    ('def f(x): return 5', {'test': 'import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(1), 1)\n'
                                   'if __name__ == "__main__":\n    unittest.main()', 'entry_point': 'f'}, 'error'),
    ('no code', asserts('f(1) == 1'), 'error'),
    ('def f(x): return x', asserts('y = f(1)', 'assert y == 1'), 1),
    ('def f(x): return 5', asserts('same(f(1), 1)', test_setup_code='def same(a, b):\n    assert a == b'), 0),
    ('def f(x): return 5', {'test': 'assert f(1) == 1', 'entry_point': 'f'}, 0),
    ('x', {'a': 1}, None),
    ('no code', asserts('assert f(1)==1'), 0, 'no_code'),
    ('no code', asserts('assert f(1)==1', test_setup_code='f(1)'), 0, 'no_code'),
    ('no code', {'a': 1}, None),
    ('def f(x): return 1', asserts('import sys\nsys.exit(0)'), 0),
    ('def f(x): return 1', asserts('while f(1): pass'), 0, 'timeout'),
    ('def f(x): return 10**7', asserts('assert 3**(f(1)**2) == 1'), 0, 'timeout'),
    ('def f(x):\n    while True: pass', check('try: candidate(1)', 'except BaseException: pass', 'assert 0'), 0, 'timeout'),
    # What the prompt has defined in full cannot be redefined, but what it has left open.
    ('def f(x): return x+1', asserts('assert f(1)==2', prompt='def f(x):\n    "One more."\n'), 1),
    ('def f(x): return x+2', asserts('assert f(1)==2', prompt='def f(x):\n    "One more."\n    ...\n'), 0),
    ('def f(x): return x+1', asserts('assert f(1)==2', prompt='def f(x):\n    raise NotImplementedError("f")\n'), 1),
    ('    return x+1', asserts('assert same(f(1),2)', prompt='def same(a,b): return a==b\ndef f(x):\n'), 1),
    ('    return 5\ndef same(a,b): return True', asserts('assert same(f(1),2)', prompt='def same(a,b): return a==b\ndef f(x):\n'), 0),
    ('def same(a,b): return True\ndef f(x): return 5',
     asserts('assert same(f(1),2)', prompt='def same(a,b):\n    "Equal."\n    return a==b\ndef f(x): pass\n'), 0),
    ('import atexit\natexit.register(print, 2)\nprint(1)', pairs([''] * 2, ['1\n2'] * 2), 1),
    ('import sys, io\nprint(1)\nsys.stdout = io.StringIO()\nprint(2)', pairs([''] * 2, ['1'] * 2), 1),
    ('import os\nfor i in range(3): os.close(i)', pairs([''] * 2, [''] * 2), 1),
    ('print(1)\nexit(1)', pairs([''], ['1']), 0),
]

# The code of a tool's program; patterns of its outcome and its output.
PROGRAMS = [
    ("print(1)", "passed", r"1\n"),
    ("", "passed", ""),
    ("import sys\nprint('a', end='')\nprint('b', file=sys.stderr)\nprint('c')", "passed", r"ab\nc\n"),
    ("import os\nos.write(1, b'a\\xff\\0')\nprint('\\u20ac')", "passed", "a\ufffd\0\u20ac\n"),
    ("import atexit\natexit.register(print, 'end')\nprint('start')", "passed", r"start\nend\n"),
    ("import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()", "passed", r"late\n"),
    ("import sys\nprint(__name__, sys.argv, open(0).read())\nexit()", "passed", r"__main__ \['solution.py'\] \n"),
    ("def f(x):\n    return 1 / x\nf(0)", "failed",
     r'Traceback [^\n]*\n  File "solution.py", line 3, in <module>\n    f\(0\)\n.*  File "solution.py", line 2, in f\n.*\n'
     r'ZeroDivisionError: division by zero\n'),
    ("x = = 1", "failed", r'  File "solution.py", line 1\n.*SyntaxError: .*\n'),
    ("exit('bye')", "failed", r"bye\n"),
    ("print('so far')\nexit(3)", "failed", r"so far\n"),
    ("import os\nprint('so far')\nos._exit(0)", "failed", r"so far\nerror: the program has ended its process"),
    ("print('so far', end='')\nwhile True: pass", "timeout", r"so far\nerror: ended after 4 s"),
    ("while True: print('\\u20ac')", "timeout|failed", r"(\u20ac\n)+(\u20ac\n?)?\n?\.\.\. \(\d+ bytes more\)\nerror: .*"),
    ("a = []\nwhile True: a.append(bytearray(1 << 20))", "failed", r"Traceback .*MemoryError\n|error: ended after \d+ MiB of memory"),
    ("print('x' * 4094)", "passed", r"x{4094}\n"),
    ("print('x' * 4096)", "passed", r"x+\n\.\.\. \(\d+ bytes more\)"),
    ("import os\nfor i in range(200): os.write(1, b'\\xff' * 65536)", "failed", r"\ufffd+\n\.\.\. \(25\d{6} bytes more\)\nerror: OSError: .*"),
    ("import os\nprint(os.listdir('.'))", "passed", r"\['\.stdin'\]\n"),
    ("import os\nos.ftruncate(1, 0)\nos.ftruncate(1, 1 << 20)\nprint('a')", "passed", r"a\n\0+\n\.\.\. \(\d+ bytes more\)"),
    ("import os\nos.closerange(0, 64)", "failed", "error: .*"),
]


def failure_of(case, answer):
    if not isinstance(case[1], str):
        _, _, reward, *outcome = case
        expected = outcome[0] if outcome else {1: "passed", 0: "failed"}.get(reward)
        return answer.get("reward", "error") != reward or answer.get("outcome") != expected
    _, outcome, output = case
    shown = answer.get("output", "no output")
    return len(shown.encode()) > 4096 or not (re.fullmatch(outcome, answer.get("outcome", "")) and re.fullmatch(output, shown, re.S))


def main():
    failures, worked = [], []
    for tier in ("namespaces", "landlock"):
        command = [sys.executable, os.path.join(ROOT, "scripts", "cohort_sandbox.py"), "--timeout", "4", "--sandbox", tier, "--prefix", "{prompt}"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for index, case in enumerate(CASES + PROGRAMS):
            code, fields, *_ = case
            completion = code if "```" in code or "~~~" in code or code == "no code" else f"```python\n{code}\n```"
            request = {"code": code} if isinstance(fields, str) else {"completion": completion, "fields": fields}
            process.stdin.write(json.dumps({"index": index, **request}).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            if "no sandbox works" in answer.get("error", ""):
                print(tier, "does not work here:", answer["error"])
                break
            if answer["index"] != index or failure_of(case, answer):
                failures.append(f"{tier}: {code!r} gets {answer}, not {case[1:]}")
        else:
            worked.append(tier)
        process.stdin.close()
        process.wait()
    print(f"{len(CASES + PROGRAMS)} cases in {worked}: {len(failures)} failures", *failures, sep="\n  ")
    sys.exit(1 if failures or not worked else 0)


if __name__ == "__main__":
    main()
