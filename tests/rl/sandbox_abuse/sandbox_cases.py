#!/usr/bin/env python3
"""Checks the scores of scripts/cohort_sandbox.py for solutions and tests of all kinds, in the tiers that work here."""
import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


def asserts(*tests, **more):
    return {"test_list": list(tests), **more}


def pairs(inputs, outputs, **more):
    return {"inputs": inputs, "outputs": outputs, **more}


# Code in a block, or a completion that has one; fields; the reward, or "error".
CASES = [
    ('def f(x): return x, x+1', pairs([[0], [2]], [[0, 1], [2, 3]], fn_name='f'), 1),
    ('def f(x): return x', pairs([[0], [2]], [[0, 1], [2, 3]], fn_name='f'), 0),
    ('raise ValueError', pairs([[0]], [[0]], fn_name='f'), 0),
    ('1. x\n   ```python\n   def f(x):\n       return x\n   ```\n', asserts('assert f(1)==1'), 1),
    ('~~~~\ndef f(x): return x\n```\n~~~~', asserts('assert f(1)==1'), 0),
    ('def sum(a,b): return 6', asserts('assert sum(10,15)==6'), 1),
    ('def abs(x): return 0\ndef f(x): return 9', asserts('assert abs(f(1)-1)<1e-3'), 0),
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
    ('x', {'a': 1}, None),
    ('no code', asserts('assert f(1)==1'), 0),
    ('def f(x): return 1', asserts('import sys\nsys.exit(0)'), 0),
    ('def f(x): return 1', asserts('while f(1): pass'), 0),
    ('def f(x): return 10**7', asserts('assert 3**(f(1)**2) == 1'), 0),
]


def main():
    failures, worked = [], []
    for tier in ("namespaces", "landlock"):
        command = [sys.executable, os.path.join(ROOT, "scripts", "cohort_sandbox.py"), "--timeout", "4", "--sandbox", tier]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for index, (code, fields, expected) in enumerate(CASES):
            completion = code if "```" in code or "~~~" in code or code == "no code" else f"```python\n{code}\n```"
            process.stdin.write(json.dumps({"index": index, "completion": completion, "fields": fields}).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            if "no sandbox works" in answer.get("error", ""):
                print(tier, "does not work here:", answer["error"])
                break
            if answer["index"] != index or answer.get("reward", "error") != expected:
                failures.append(f"{tier}: {code!r} gets {answer}, not {expected}")
        else:
            worked.append(tier)
        process.stdin.close()
        process.wait()
    print(f"{len(CASES)} cases in {worked}: {len(failures)} failures", *failures, sep="\n  ")
    sys.exit(1 if failures or not worked else 0)


if __name__ == "__main__":
    main()
