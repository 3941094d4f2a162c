"""`make soak`: runs the soak, prints its table, and writes bench/results/soak.json."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

from tests.soak.options import SoakOptions
from tests.soak.report import Verdict
from tests.soak.soak import Soak


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def _run_until_signal(soak: Soak) -> bool:
    """Run the soak until its end or a signal; return True if it finished."""
    soak_task = asyncio.ensure_future(soak.run())
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, soak_task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await soak_task
    return not soak_task.cancelled()


def main() -> None:
    """Exit with 0 after a passed soak. Otherwise, exit with 1 and keep the logs."""
    options = SoakOptions.read()
    soak = Soak(options, _print_line)
    _print_line(f"logs: {soak.fleet.logs}")
    is_finished = asyncio.run(_run_until_signal(soak))
    if not is_finished:
        sys.exit("stopped early: no verdict, and no result is written")
    verdict = Verdict(soak)
    _print_line("\n".join(verdict.make_lines()))
    if options.output is not None:
        verdict.write(options.output)
    if not verdict.has_passed:
        sys.exit(1)
    soak.fleet.remove()


if __name__ == "__main__":
    main()
