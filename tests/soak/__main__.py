"""`make soak`: runs the soak, prints its table, and writes bench/results/soak.json."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

from tests.soak.options import SoakOptions
from tests.soak.report import Verdict
from tests.soak.soak import Soak


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def _until_told(soak: Soak) -> bool:
    """True when it came to its end; a signal ends it early, and leaves no process behind."""
    running = asyncio.ensure_future(soak.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running
    return not running.cancelled()


def main() -> None:
    """Exit with 0 where everything held to the end, else with 1 and the logs kept."""
    options = SoakOptions.read()
    soak = Soak(options, _say)
    _say(f"logs: {soak.fleet.logs}")
    came_to_its_end = asyncio.run(_until_told(soak))
    if not came_to_its_end:
        sys.exit("told to end before its time: no verdict, and no result is written")
    verdict = Verdict(soak)
    _say("\n".join(verdict.lines()))
    if options.output is not None:
        verdict.write(options.output)
    if not verdict.has_passed:
        sys.exit(1)
    soak.fleet.remove()


if __name__ == "__main__":
    main()
