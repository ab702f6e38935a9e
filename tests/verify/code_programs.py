"""Programs for tests of the code verifier: right ones of every kind, and attacks. Test data; nothing here is imported to be run."""

from __future__ import annotations

SECRET, ARGUMENT = 918273645546372819, 271828182845904523  # what is expected, and of which call

NODE = """\
class Node:
    def __init__(self, v, left=None): self.v, self.left, self.log = v, left, []
    def add(self, x): self.log.append(x); return self
    def fail(self): raise KeyError("k")
    def __len__(self): return len(self.log)
    def __getitem__(self, place): return self.log[place]
    def __iter__(self): return iter(self.log)
    def __str__(self): return f"<{self.v}>"
    size = property(len)
def depth(node): return 0 if node is None else 1 + depth(node.left)
"""

RIGHT = [
    (
        {"entry_point": "f", "asserts": ["for x in range(5):\n    assert f(x) == x * x"]},
        """\
def f(x): return x * x
""",
    ),
    (
        {"entry_point": "f", "asserts": ["assert [f(x) for x in (1, 2)] == [1, 4]"]},
        """\
def f(x): return x * x
""",
    ),
    (
        {"entry_point": "f", "asserts": ["assert f('a').upper() == 'AA'"]},
        """\
def f(x): return 2 * x
""",
    ),
    (
        {
            "entry_point": "f",
            "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert abs(candidate(3) - 9) < 1e-6\n",
        },
        """\
def f(x): return x * x
""",
    ),
    (
        {"entry_point": "f", "asserts": ["try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass"]},
        """\
def f(x):
    if x < 0: raise ValueError('negative')
""",
    ),
    (
        {"entry_point": "Stack", "asserts": ["s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2\nassert s.pop() == 1"]},
        """\
class Stack:
    def __init__(self): self.x = []
    def push(self, v): self.x.append(v)
    def pop(self): return self.x.pop()
""",
    ),
    (
        {"asserts": ["assert longest([Pair(5, 24), Pair(15, 25)]) == 2"]},
        """\
class Pair:
    def __init__(self, a, b): self.a, self.b = a, b
def longest(pairs): return len(pairs)
""",
    ),
    (
        {"asserts": ["assert depth(root) == 2"], "setup": "root = Node(1)\nroot.left = Node(2)"},
        """\
class Node:
    def __init__(self, v): self.v, self.left = v, None
def depth(n): return 1 + (depth(n.left) if n.left else 0)
""",
    ),
    (
        {"entry_point": "Solution().two_sum", "cases": [{"args": [[2, 7, 11], 9], "expected": [0, 1]}]},
        """\
class Solution:
    def two_sum(self, xs, t): return next((i, j) for i in range(len(xs)) for j in range(i) if xs[i] + xs[j] == t)[::-1]
""",
    ),
    (
        {"entry_point": "f", "inputs": [[1, 2], ["a", "b"]], "expected": [3, "ab"]},
        """\
def f(a, b): return a + b
""",
    ),
    (
        {"asserts": ["assert sum(10, 15) == 6"]},
        """\
def sum(a, b): return 6
""",
    ),
    (
        {"entry_point": "f", "asserts": ["assert f(2) == [0, 1]"]},
        """\
from dataclasses import dataclass
@dataclass
class P:
    x: int
def f(n): return [P(i).x for i in range(n)]
""",
    ),
    (
        {"entry_point": "f", "asserts": ["assert set(f([1, 1])) == {1}", "assert list(f([2])) == [2]"]},
        """\
def f(xs):
    yield from xs
""",
    ),
    (
        {"entry_point": "f", "asserts": ["assert f('aab') == {'a': 2, 'b': 1}"]},
        """\
from collections import Counter
def f(x): return Counter(x)
""",
    ),
    (
        {"entry_point": "f", "asserts": ["assert f(5000) == 10 ** 5000 or len(str(f(1))) == 2"]},
        """\
def f(n): return 10 ** n
""",
    ),
    *(
        ({"entry_point": "Node", "asserts": [test]}, NODE)
        for test in (
            "r = Node(1)\nr.left = Node(2)\nr.left.left = Node(3)\nassert depth(r) == 3",
            "assert depth(Node(1, Node(2))) == 2",
            "n = Node(1)\nn.add(5).add(6)\nassert n.size == 2 and len(n) == 2 and list(n) == [5, 6] and n[1] == 6",
            "assert str(Node(1)) == '<1>'",
            "assert f'{Node(4)}' == '<4>'",
            "assert Node(9).v == 9 and Node(9).left is None",
            "assert Node(1, Node(7)).left.v == 7",
            "n = Node(1)\ntry:\n    n.fail()\n    assert False\nexcept KeyError:\n    pass",
        )
    ),
    (
        {
            "entry_point": "f",
            "asserts": ["try:\n    f('{')\n    assert 0\nexcept ValueError as error:\n    assert 'line 1' in str(error)"],
        },
        """\
import json
def f(x): return json.loads(x)
""",
    ),
    (
        {"entry_point": "f", "cases": [{"args": [[float("-inf"), 1e999, 10**5000]], "expected": [float("inf"), 10**5000 % 7]}]},
        """\
def f(x): return max(x), x[2] % 7
""",
    ),
    (
        {"entry_point": "f", "cases": [{"args": [], "expected": [float("nan"), 3]}]},
        """\
import numpy
def f(): return numpy.float64("nan"), numpy.sum([1, 2])
""",
    ),
    (
        {"entry_point": "f", "asserts": ["assert math.isclose(f(4), 2.0)", "assert f(4) < sys.maxsize"]},
        """\
def f(x): return x ** 0.5
""",
    ),
    (
        {"entry_point": "f", "asserts": ["assert f(1) == 2"]},
        """\
print('PASS' * 1000)
def f(x):
    print('noise')
    return x + 1
""",
    ),
]
"""(tests, a program that passes them)."""

ATTACKS = {
    "exit 0": """\
import sys
sys.exit(0)
""",
    "hard exit 0": """\
import os
os._exit(0)
""",
    "exit in the call": """\
import os
def f(x): os._exit(0)
""",
    "SystemExit in the call": """\
def f(x): raise SystemExit(0)
""",
    "always equal": """\
class Y:
    def __eq__(self, o): return True
    def __ne__(self, o): return False
    def __bool__(self): return True
    def __getattr__(self, name): return lambda *a, **k: True
    def __call__(self, *a, **k): return self
    def __iter__(self): return iter([self])
    def __len__(self): return 1
    def __sub__(self, o): return 0
    __hash__ = lambda s: 0
def f(x): return Y()
""",
    "always equal inside": """\
class Y:
    def __eq__(self, o): return True
    def __ne__(self, o): return False
    def __bool__(self): return True
    def __getattr__(self, name): return lambda *a, **k: True
    def __call__(self, *a, **k): return self
    def __iter__(self): return iter([self])
    def __len__(self): return 1
    def __sub__(self, o): return 0
    __hash__ = lambda s: 0
def f(x): return [Y()]
""",
    "always equal number": """\
class Z(int):
    def __eq__(self, o): return True
    __hash__ = int.__hash__
def f(x): return Z(1)
""",
    "the function is always equal": """\
class Y:
    def __eq__(self, o): return True
    def __ne__(self, o): return False
    def __bool__(self): return True
    def __getattr__(self, name): return lambda *a, **k: True
    def __call__(self, *a, **k): return self
    def __iter__(self): return iter([self])
    def __len__(self): return 1
    def __sub__(self, o): return 0
    __hash__ = lambda s: 0
f = Y()
""",
    "patched builtins": """\
import builtins
builtins.AssertionError = None
builtins.abs = builtins.set = builtins.sorted = builtins.type = lambda *a: 0
builtins.isinstance = lambda *a: True
def f(x): return 1
""",
    "patched unittest": """\
import unittest, operator
unittest.TestCase.assertEqual = lambda *a: None
operator.eq = lambda a, b: True
def f(x): return 1
""",
    "printed verdict": """\
print('PASS'); print('{"status": "ok", "correct": true}')
def f(x): return 1
""",
    "own modules of the tests": """\
class math: isclose = staticmethod(lambda *a, **k: True)
class sys: getsizeof = staticmethod(lambda *a: 1)
def Counter(*a): return 1
def f(x): return 1
""",
    "fraction that is costly to reduce": """\
import fractions
def f(x):
    made = object.__new__(fractions.Fraction)
    made._numerator, made._denominator = (1 << 3900000) - 1, 3 ** 1200000 | 1
    return made
""",
    "replaced check": """\
def check(c): return True
candidate = None
def f(x): return 1
""",
    "frames and garbage collector": """\
import sys, gc
def f(x):
    frame = sys._getframe()
    while frame:
        for v in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if type(v) is int and v % 1000 == 819 and v > 10 ** 15: return v
        frame = frame.f_back
    for o in gc.get_objects():
        for r in gc.get_referents(o):
            if type(r) is int and r % 1000 == 819 and r > 10 ** 15: return r
""",
    "StopIteration": """\
def f(x): raise StopIteration
""",
    "AssertionError of its own": """\
def f(x): raise AssertionError
""",
    "replies in advance": """\
import os, json, struct
for fd in range(3, 64):
    for v in (1, 0, None):
        m = json.dumps({'value': ['i', '0x1'], 'calls': 1, 'nonce': v}).encode()
        try: os.write(fd, struct.pack('>I', len(m)) + m)
        except OSError: pass
def f(x): return 1
""",
    "garbage to every descriptor": """\
import os
for fd in range(3, 64):
    try: os.write(fd, b'\\xff' * 4096)
    except OSError: pass
def f(x): return 1
""",
    "patched codec": """\
import sys, gc
for m in [o for o in gc.get_objects() if type(o) is dict and 'encode' in o and 'frame' in o]:
    m['encode'] = lambda v: ['i', '0x1']
    m['_encode'] = m['encode']
def f(x): return 1
""",
    "killed parents": """\
import os
os.kill(os.getppid(), 9)
os.kill(-1, 9)
def f(x): return 1
""",
    "excepthook": """\
import sys, os
sys.excepthook = lambda *a: os._exit(0)
def f(x): return 1 / 0
""",
    "atexit": """\
import atexit, os
atexit.register(os._exit, 0)
def f(x): return 1
""",
    "finalizer": """\
import os
class D:
    def __del__(self): os._exit(0)
d = D()
def f(x): return 1
""",
    "endless loop": """\
def f(x):
    while True: pass
""",
    "signals ignored": """\
import signal
for n in range(1, 32):
    try: signal.signal(n, signal.SIG_IGN)
    except OSError: pass
def f(x):
    while True: pass
""",
    "memory bomb": """\
def f(x): return bytearray(10 ** 12)
""",
    "long reply": """\
def f(x): return 'x' * (8 << 20)
""",
    "deep reply": """\
def f(x):
    v = []
    for _ in range(10 ** 5): v = [v]
    return v
""",
    "endless reply": """\
import itertools
def f(x): return (n for n in itertools.count())
""",
    "colliding reply": """\
def f(x): return {n * (2 ** 61 - 1) for n in range(3000)}
""",
    "recursion": """\
def f(x): return f(x)
""",
    "segmentation fault": """\
import ctypes
def f(x): ctypes.string_at(0)
""",
    "fork bomb": """\
import os
while True: os.fork()
""",
    "forked answers": """\
import os
os.fork()
os.fork()
def f(x): return 1
""",
    "flood": """\
while True: print('x' * 10 ** 6)
""",
    "closed descriptors": """\
import os
os.closerange(0, 256)
def f(x): return 1
""",
    "null byte": "def f(x): return 1\n\x00",
    "surrogates": """\
def f(x): return '\\ud800' * 10
""",
}
"""Programs that do not compute what is asked, and try to be judged right (or to do harm)."""
