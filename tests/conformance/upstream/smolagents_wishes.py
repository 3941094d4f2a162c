"""Program that runs a smolagents agent, with or without streaming, and prints its steps.

Usage: smolagents_wishes.py BASE_URL API_KEY whole|streamed
"""

from __future__ import annotations

import json
import sys

from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool


@tool
def look(box: str) -> str:
    """Looks into a box.

    Args:
        box: its colour.
    """
    return "key" if box == "red" else "nothing"


def main() -> None:
    """Run the agent; print its answer, tool calls and errors."""
    agent = ToolCallingAgent(
        tools=[look],
        model=OpenAIServerModel("any", api_base=sys.argv[1], api_key=sys.argv[2]),
        stream_outputs=sys.argv[3] == "streamed",
        verbosity_level=LogLevel.OFF,
        max_steps=4,
    )
    answer = agent.run("Where is the key?")
    steps = [step for step in agent.memory.steps if hasattr(step, "tool_calls")]
    calls = [[call.name, call.arguments] for step in steps for call in step.tool_calls or []]
    errors = [str(step.error) for step in steps if step.error]
    report = json.dumps({"answer": str(answer), "calls": calls, "errors": errors})
    sys.stdout.write(f"\n{report}\n")  # a streaming agent also prints its text


if __name__ == "__main__":
    main()
