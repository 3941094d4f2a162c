"""An agent program. The first argument selects the behavior."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from openai import OpenAI

TASK = json.loads(os.environ["LUDUS_TASK"])


def complete() -> str:
    """Return the policy's completion, with the address and key from the environment variables."""
    response = OpenAI().chat.completions.create(
        model=os.environ["OPENAI_MODEL"], messages=[{"role": "user", "content": TASK["text"]}]
    )
    return response.choices[0].message.content or ""


def main(behavior: str) -> None:
    """Play the episode."""
    if behavior == "crash":
        sys.exit("no such file: weights.bin")
    completion = complete()
    if behavior == "hang":
        subprocess.Popen(["sleep", "4242"], start_new_session=True)
        time.sleep(60)
    secret = os.environ.get("LUDUS_TEST_SECRET", "none")
    output = {"answer": completion, "secret": secret, "text": sys.argv[2]}
    print(json.dumps(output))  # noqa: T201 - the output is the result


if __name__ == "__main__":
    main(sys.argv[1])
