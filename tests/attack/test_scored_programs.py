"""Whatever a policy says, its episode ends with a reward and is trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from ludus.env.client import AsyncEnvClient
from ludus.proto.config import RolloutConfig
from ludus.trainer.models.chat import ChatTokenizer
from tests.agents.random_policy import make_tiny_chat
from tests.attack.attacked import AttackedProcess, make_cases, serve_env
from tests.rollout.scripted_policy import make_player

pytestmark = pytest.mark.slow

_OWN_ERROR = "class E({base}):\n    {body}\n"
_RAISE = "def solve(x): raise E(chr(0xd800))\n"
_SOLVE = "def solve(x): return x\n"
PROGRAMS = {
    "surrogate in an error": "def solve(x): raise ValueError(chr(0xd800))",
    "surrogates in the arguments of an error": (
        "def solve(x): raise ValueError(chr(0xd800), {chr(0xdfff): (1, chr(0xdbff))}, b'\\xff')"
    ),
    "surrogates in the notes of a group of errors": (
        "def solve(x):\n    error = KeyError(chr(0xdc00))\n    error.add_note(chr(0xd800))\n"
        "    raise BaseExceptionGroup(chr(0xdfff), [error])"
    ),
    "syntax error with odd fields": (
        "def solve(x): raise SyntaxError(chr(0xd800), (chr(0xd801), 10**30, -5, chr(0xd802)))"
    ),
    "syntax error in the program with odd fields": (
        "raise SyntaxError('x', ('x', object(), [], {}))"
    ),
    "notes that are no list": (
        "class E(Exception): __notes__ = property(lambda self: 1 / 0)\n"
        "def solve(x): raise E\nsolve(1)"
    ),
    "error whose text is endless": _OWN_ERROR.format(
        base="Exception", body="def __str__(self):\n        while True: pass"
    )
    + _RAISE,
    "error whose text raises itself": _OWN_ERROR.format(
        base="BaseException", body="def __str__(self): raise self"
    )
    + _RAISE,
    "error whose text is no text": _OWN_ERROR.format(
        base="Exception", body="def __str__(self): return 5\n    __repr__ = __str__"
    )
    + _RAISE,
    "error without a traceback": _OWN_ERROR.format(
        base="Exception", body="__traceback__ = property(lambda self: 1 / 0)"
    )
    + "raise E",
    "error that causes itself": "e = ValueError()\ne.__cause__ = e\nraise e",
    "long chain of causes": (
        "e = None\nfor _ in range(100_000):\n    e, f = ValueError(), e\n    e.__cause__ = f\n"
        "raise e"
    ),
    "deep groups of errors": (
        "e = ValueError()\nfor _ in range(5000): e = ExceptionGroup('g', [e])\nraise e"
    ),
    "type with a long name": "def solve(x): raise type('a' * 10**7, (Exception,), {})",
    "type with a hostile type": (
        "class M(type):\n    __name__ = __qualname__ = __module__ = property(lambda s: 1 / 0)\n"
        "class E(Exception, metaclass=M): pass\ndef solve(x): raise E"
    ),
    "cancellation": "import asyncio\ndef solve(x): raise asyncio.CancelledError(chr(0xd800))",
    "end of a generator": "def solve(x): raise GeneratorExit(chr(0xd800))",
    "exit with an odd code": "def solve(x): raise SystemExit(10**5000)",
    "exit with a tuple": "raise SystemExit((chr(0xd800), 1))",
    "negative exit code": "import os\ndef solve(x): os._exit(-77)",
    "interrupt of the program": "raise KeyboardInterrupt",
    "exit that never ends": "import atexit\n@atexit.register\ndef f():\n    while True: pass",
    "exit that sleeps": "import atexit, time\natexit.register(time.sleep, 600)",
    "output at the end": "import atexit\natexit.register(print, chr(0xd800) * 10**6)",
    "stop by a timer": (
        "import ctypes, struct, time\nlibc = ctypes.CDLL(None)\nt = ctypes.c_long()\n"
        "libc.timer_create(1, struct.pack('qii48x', 0, 19, 0), ctypes.byref(t))\n"
        "libc.timer_settime(t, 0, struct.pack('qqqq', 0, 0, 0, 1000), None)\ntime.sleep(600)"
    ),
    "alarm": "import signal, time\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\ntime.sleep(600)",
    "closed descriptors and sleep": "import os, time\nos.closerange(0, 64)\ntime.sleep(600)",
    "descriptors in each other's place": (
        "import os\nfor n in range(3, 64):\n    try: os.dup2(1, n)\n    except OSError: pass\n"
        + _SOLVE
    ),
    "descriptors that do not block": (
        "import os\nfor n in range(64):\n    try: os.set_blocking(n, False)\n"
        "    except OSError: pass\ndef solve(x): return 'x' * 10**6"
    ),
    "closed streams": "import sys\nsys.stdout.close()\nsys.stderr.close()\n" + _SOLVE,
    "stream that raises": (
        "import sys\nclass S:\n    def __getattr__(self, name): raise SystemExit(chr(0xd800))\n"
        "sys.stdout = sys.stderr = S()\n" + _RAISE
    ),
    "no modules": "import sys\nsys.modules.clear()\n" + _RAISE,
    "no functions": "import builtins\nfor n in list(vars(builtins)): delattr(builtins, n)",
    "no names in the runner": "import sys\nsys._getframe(1).f_globals.clear()\n" + _SOLVE,
    "hooks": (
        "import sys\ndef f(*_): raise SystemExit(chr(0xd800))\n"
        "sys.excepthook = sys.unraisablehook = f\nsys.settrace(f)\nsys.setprofile(f)\n" + _SOLVE
    ),
    "number of any length": (
        "import sys\nsys.set_int_max_str_digits(0)\ndef solve(x): return 10 ** 300_000"
    ),
    "numbers with many digits": "def solve(x): return [10 ** 4000] * 200",
    "texts that lie": (
        "class T(str):\n    def __str__(self): return 5\n    __repr__ = __hash__ = __str__\n"
        "def solve(x): return {T('a'): T('b')}"
    ),
    "numbers that lie": (
        "class N(int):\n    def __repr__(self): return 'x'\n"
        "class F(float):\n    def __repr__(self): return ']'\n"
        "def solve(x): return [N(1), F(2), {N(3): F(4)}]"
    ),
    "list that grows": (
        "class L(list):\n    def __iter__(self):\n        while True: yield 1\n"
        "def solve(x): return L([1])"
    ),
    "no memory": "x = []\nwhile True: x.append(bytearray(1 << 12))",
    "no memory for an error": (
        "def solve(x):\n    try: return solve([x] * 10**6)\n    finally: [0] * 10**8"
    ),
    "source of one expression": "x = " + "-" * 200_000 + "1",
    "source that names another encoding": "# coding: utf-16\n# coding: undefined\n" + _SOLVE,
    "source with a mark of its byte order": "\ufeff\ufeff" + _SOLVE,
    "controls and noncharacters": "\x01\x1b\x7f\u2028\ufdd0\ufffe\U0010ffff",
    "unprintable output": "print(bytes(range(1, 256)).decode('latin-1') + '\\u2028\\ufdd0' * 99)",
    "special tokens in the output": "print('<|end|><|system|>' * 100)\nraise ValueError('<|end|>')",
    "jump out of the stack": ("import ctypes\nctypes.CFUNCTYPE(None)(1)()"),
    "trap": (
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(b'\\xcc\\xf4')\n"
        "ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()"
    ),
}
ANSWERS = {
    "digits": "9" * 5000,
    "digits of another script": "٣" * 20,
    "digits that are no numbers": "²³①",
    "exponent": "1e999999999",
    "not a number": "NaN",
    "number that a float lacks": "-1e400",
    "JSON with a number of many digits": '{"answer": 1' + "0" * 4000 + "}",
    "JSON with a surrogate": '{"text": "\\ud800", "\\udfff": 1}',
    "JSON of another type": '[{"orders": []}]',
    "JSON without an end": "[" * 50_000,
    "orders": "buy 999999999, buy 1, sell 0, hold",
    "empty": " ",
    "null": "\0",
    "controls": "\x1b]0;x\x07\u202e\u2028\ufdd0\ufeff",
    "special tokens": "<|end|><|system|>1<|end|>",
    "thoughts without an end": "<think>" * 1000,
    "ends of thoughts": "</think>" * 1000,
    "tool calls": '<tool_call>{"name": 5, "arguments": [[]]}</tool_call>' * 100,
    "answer tags": "<final_answer>" * 100 + "1" + "</final_answer>" * 99,
}
ENVIRONMENTS = {
    "math_env": (),
    "echo_env": (),
    "trading_env": (),
    "uno_env": (),
    "openspiel_env": ("--options", '{"game": "blackjack"}'),
}


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return make_tiny_chat()


@pytest.fixture(scope="module")
def coding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedProcess]:
    options = '{"time_limit_s": 1, "max_turns": 1, "memory_mb": 256}'
    arguments = ["--isolation", "process", "--options", options]
    folder = tmp_path_factory.mktemp("coding") / "empty"
    with serve_env(folder, *arguments, target="coding_env") as attacked:
        yield attacked


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, AttackedProcess]]:
    with ExitStack() as stack:
        attacked = {}
        for target, arguments in ENVIRONMENTS.items():
            folder = tmp_path_factory.mktemp("environment") / "empty"
            server = serve_env(folder, *arguments, target=target)
            attacked[target] = stack.enter_context(server)
        yield attacked


async def check_scored(
    attacked: AttackedProcess, chat: ChatTokenizer, text: str, *, max_turns: int = 2
) -> None:
    """Play an episode with a policy that repeats a text; its end must have a reward."""
    limits = RolloutConfig(max_completion_tokens=8, max_tokens=200_000, max_turns=max_turns)
    async with await AsyncEnvClient.connect(attacked.grpc) as client:
        player, policy = make_player(client, chat, iter([text] * max_turns), limits=limits)
        rollout = await player.play_episode(1)
    assert policy.prompts
    assert not rollout.status.is_void, rollout.failure
    assert rollout.reward is not None


@pytest.mark.parametrize("program", make_cases(PROGRAMS, 2))
async def test_program_ends_in_a_scored_step(
    coding: AttackedProcess, chat: ChatTokenizer, program: str
) -> None:
    await check_scored(coding, chat, f"```python\n{program}\n```")


def step_over_http(attacked: AttackedProcess, code: str) -> dict[str, object]:
    """Send a program in ASCII, so that its surrogates are escapes; return the reply."""
    with httpx.Client(base_url=attacked.http, timeout=60) as client:
        reset = client.post("/reset", json={"seed": 1})
        session_id = reset.headers["x-session-id"]
        headers = {"x-session-id": session_id, "content-type": "application/json"}
        content = json.dumps({"action": {"code": code}})
        response = client.post("/step", content=content, headers=headers)
        assert response.status_code == 200, response.text[:1000]
        reply: dict[str, object] = response.json()
        return reply


SOURCES = {
    "surrogate": "def solve(x): return '\ud800'",
    "surrogate in a name": "x\udfff = 1",
    "surrogate in a comment": "# \udc80\n" + _SOLVE,
    "half of a character": "x = '\ud83d'; y = '\ude00'; z = '\ude00\ud83d'",
    "null": "def solve(x): return '\0'",
    "only nulls": "\0\0\0",
    "many lines": "x = 1\n" * 1_000_000,
    "one long line": "x" * 10_000_000,
    "one long comment": "#" + "\ud800" * 1_000_000,
}


@pytest.mark.parametrize("source", make_cases(SOURCES))
def test_source_over_http_ends_in_a_scored_step(coding: AttackedProcess, source: str) -> None:
    assert step_over_http(coding, source)["reward"] == 0.0


@pytest.mark.attack
@pytest.mark.parametrize("text", make_cases(ANSWERS, len(ANSWERS)))
@pytest.mark.parametrize("target", ENVIRONMENTS)
async def test_answer_ends_in_a_scored_step(
    environments: dict[str, AttackedProcess], chat: ChatTokenizer, target: str, text: str
) -> None:
    await check_scored(environments[target], chat, text)
