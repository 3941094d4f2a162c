"""Programs that try to make their own step fail end in a scored step."""

from __future__ import annotations

import orjson
import pytest

from coding_env import CodeAction, make_environment
from ludus.env.encoding import encode_transition

_WRITE_TO_DESCRIPTORS = """
import os
def flood(data):
    for descriptor in range(3, 64):
        try: os.write(descriptor, data)
        except OSError: pass
"""
_NEST_VALUE = """
def solve(x):
    value = []
    for _ in range({depth}):
        value = [value]
    return value
"""
PROGRAMS = {
    "surrogate in an error": "def solve(x): raise ValueError(chr(0xd800))",
    "surrogates in a traceback": "raise ValueError(chr(0xdfff) * 10)",
    "surrogate in a returned value": "def solve(x): return [chr(0xd800), {chr(0xdc00): 1}]",
    "surrogate in the name of a type": (
        "class E(Exception): pass\nE.__qualname__ = chr(0xd800)\nE.__module__ = chr(0xd801)\n"
        "def solve(x): raise E"
    ),
    "surrogates in the output": (
        "import sys\nsys.stdout.reconfigure(errors='surrogatepass')\n"
        "print(chr(0xd800))\nprint(chr(0xdfff), file=sys.stderr)"
    ),
    "surrogate in the source": "def solve(x): return '\ud800'",
    "null in the source": "def solve(x): return '\0'",
    "invalid UTF-8": "import os\nos.write(1, bytes(range(256)))\nos.write(2, b'\\xff\\xfe')",
    "nulls in the output": "print('\\0' * 5000)\ndef solve(x): return '\\0'",
    "output without end": "while True: print('x' * 65536)",
    "error with a huge text": "def solve(x): raise ValueError('x' * 10**7)",
    "name of a module that is no text": (
        "class E(Exception): pass\nE.__module__ = 5\ndef solve(x): raise E"
    ),
    "error in the text of an error": (
        "class E(Exception):\n    def __str__(self): raise SystemExit(3)\ndef solve(x): raise E"
    ),
    "exit": "raise SystemExit(chr(0xd800))",
    "exit with a huge code": "import os\nos._exit(2**31 - 1)",
    "interrupt": "def solve(x): raise KeyboardInterrupt(chr(0xd800))",
    "abort": "import os\nos.abort()",
    "segmentation fault": "import ctypes\nctypes.string_at(0)",
    "recursion": "def solve(x): return solve(x)",
    "recursion without a limit": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef solve(x): return solve(x)"
    ),
    "nested value": _NEST_VALUE.format(depth=330),
    "value nested nearly too deeply to parse": _NEST_VALUE.format(depth=960),
    "value nested too deeply": _NEST_VALUE.format(depth=5000),
    "nested source": "(" * 50_000,
    "huge number": "def solve(x): return 10 ** 4299",
    "number with too many digits": "def solve(x): return 10 ** 10_000",
    "numbers that JSON lacks": "def solve(x): return [float('nan'), float('inf'), -float('inf')]",
    "value that is no JSON": "def solve(x): return {1, 2}",
    "value that contains itself": "def solve(x): v = []; v.append(v); return v",
    "closed descriptors": "import os\nos.closerange(0, 64)\ndef solve(x): return x",
    "no standard streams": "import sys\nsys.stdout = sys.stderr = None\ndef solve(x): return x",
    "replaced parts of the runner": (
        "import json, os, traceback\njson.dumps = lambda _: chr(0xd800)\n"
        "traceback.format_exception_only = None\ndef solve(x): raise ValueError"
    ),
    "outcomes of odd types": _WRITE_TO_DESCRIPTORS
    + 'flood(b\'5\\nnull\\n[]\\n{}\\n{"error": [1, {}]}\\n{"value": "\\\\ud800"}\\n\')',
    "outcomes of every depth": _WRITE_TO_DESCRIPTORS
    + "for n in range(900, 1000):\n    flood(b'{\"value\": ' + b'[' * n + b']' * n + b'}\\n')\n",
    "errors of every depth": _WRITE_TO_DESCRIPTORS
    + "for n in range(900, 1000):\n    flood(b'{\"error\": ' + b'[' * n + b']' * n + b'}\\n')\n",
    "outcomes with surrogates": _WRITE_TO_DESCRIPTORS
    + 'flood(b\'{"error": "\\\\udfff"}\\n\' * 20)',
    "outcomes with numbers that are too long": _WRITE_TO_DESCRIPTORS
    + "flood(b'{\"value\": ' + b'9' * 5000 + b'}\\n{\"value\": 1e999999}\\n')",
    "outcomes that are no text": _WRITE_TO_DESCRIPTORS + "flood(b'\\xff\\0\\n' * 1000)",
    "outcomes without end": _WRITE_TO_DESCRIPTORS + "while True: flood(b'x' * 65536)",
    "child that outlives the program": "import os\nif not os.fork(): import time; time.sleep(99)",
    "stop signal": "import signal\nsignal.raise_signal(signal.SIGSTOP)",
    "kill of its group": "import os, signal\nos.killpg(0, signal.SIGKILL)",
    "kill by limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1, 1))",
    "ignored signals": (
        "import signal\nfor n in range(1, 65):\n"
        "    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "def solve(x): raise ValueError"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_ends_in_a_scored_step(name: str) -> None:
    environment = make_environment(max_turns=1, num_tests=100, num_shown=100, time_limit_s=1)
    environment.reset(seed=1)
    transition = environment.step(CodeAction.model_construct(code=PROGRAMS[name]))
    result = encode_transition(transition, environment.text_renderer, 1)
    assert (result.terminated, result.success) == (True, False)
    assert result.reward is not None and 0 <= result.reward < 1
    feedback = orjson.loads(result.observation_json)["feedback"]
    assert result.text is not None
    assert orjson.loads(result.text.messages_json) == [{"role": "user", "content": feedback}]
