"""An agent as a program; its first argument says what it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from openai import OpenAI

TASK = json.loads(os.environ["LUDUS_TASK"])


def ask() -> str:
    """What the policy says; address and key come from the environment."""
    answer = OpenAI().chat.completions.create(
        model=os.environ["OPENAI_MODEL"], messages=[{"role": "user", "content": TASK["text"]}]
    )
    return answer.choices[0].message.content or ""


def main(what: str) -> None:
    """Play the episode."""
    if what == "crash":
        sys.exit("no such file: weights.bin")
    answer = ask()
    if what == "hang":
        subprocess.Popen(["sleep", "4242"], start_new_session=True)
        time.sleep(60)
    secret = os.environ.get("LUDUS_TEST_SECRET", "none")
    said = {"answer": answer, "secret": secret, "text": sys.argv[2]}
    print(json.dumps(said))  # noqa: T201 - its output is its answer


if __name__ == "__main__":
    main(sys.argv[1])
