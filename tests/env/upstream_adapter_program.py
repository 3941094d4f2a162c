"""A program that checks OpenEnv environments through the Ludus SDK.

It runs in a virtual environment with OpenEnv. Its arguments are targets, and it prints
a JSON object with the report of each target.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from ludus.env.check import CheckReport, check_environment, check_server
from ludus.env.serving.loopback import PlayOptions, open_client
from ludus.env.sessions.hosts import describe_environment
from ludus.env.targets.targets import environment_factory
from ludus.proto.errors import EnvError


def main(targets: list[str]) -> None:
    sys.stdout.write(json.dumps({target: report_on_target(target) for target in targets}))


def report_on_target(target: str) -> dict[str, Any]:
    factory = environment_factory(target, {})
    environment = factory()
    report: dict[str, Any] = {"second": try_second_instance(factory)}
    description = describe_environment(environment)
    report |= {
        "action_schema": description.action_schema,
        "observation_schema": description.observation_schema,
        "reset_options": sorted(description.reset_options or []),
        "tools": [tool.name for tool in description.tools],
    }
    environment.reset(seed=3)
    if description.tools:
        report["echo"] = environment.call_tool("echo", {"message": "hi"}).content
        report["no_tool"] = call_unknown_tool(environment)
        action = environment.action_type.model_validate({"type": "list_tools"})
        report["listed"] = environment.step(action).observation.model_dump(mode="json")["tools"]
    report["state"] = environment.state.model_dump(mode="json")
    environment.close()
    if not description.tools:
        report["broken"] = find_broken_checks(check_environment(factory, num_steps=8))
    report["broken_on_wire"], report["not_offered"], report["played"] = asyncio.run(
        check_on_wire(factory)
    )
    return report


async def check_on_wire(factory: Any) -> tuple[dict[str, str], list[str], list[Any]]:
    environment = factory()
    environment.close()
    isolation = "process" if environment.one_per_process else "inline"
    async with open_client(factory, PlayOptions(isolation=isolation, max_sessions=4)) as client:
        report = await check_server(client, num_steps=8, seeds=(1, 2))
        missing_checks = [check.name for check in report.checks if check.verdict == "not offered"]
        session, first_result = await client.open(seed=3)
        results = [first_result]
        action = {"number": 0} if "hint" in first_result.observation else {"add": 4}
        if "status" in first_result.observation.get("metadata", {}):
            action = {"type": "call_tool", "tool_name": "echo", "arguments": {"message": "hi"}}
        while not results[-1].done and len(results) < 6:
            results.append(await session.step(action))
        steps = [
            [r.observation, r.reward, r.terminated, r.truncated, r.info, r.success] for r in results
        ]
        return find_broken_checks(report), missing_checks, steps


def find_broken_checks(report: CheckReport) -> dict[str, str]:
    return {check.name: check.detail for check in report.checks if check.verdict == "broken"}


def try_second_instance(factory: Any) -> str | None:
    try:
        factory().close()
    except EnvError as error:
        return str(error.code)
    return None


def call_unknown_tool(environment: Any) -> str | None:
    try:
        environment.call_tool("nope", {})
    except EnvError as error:
        return str(error.code)
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
