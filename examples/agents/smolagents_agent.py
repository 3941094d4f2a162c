"""A smolagents agent with tools over MCP and without any code for training.

python examples/agents/smolagents_agent.py   reads OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL,
                                             LUDUS_TASK and LUDUS_MCP_URL, and prints its answer
examples/agents/service.py                   calls `solve` for many episodes in one process
"""

from __future__ import annotations

import json
import os

from smolagents import LogLevel, MCPClient, OpenAIServerModel, ToolCallingAgent

MAX_STEPS = 5
TEMPLATES = {
    # The default prompt has 2,000 tokens, mostly examples, which a trained model does not need.
    "system_prompt": "Call tools, the last of them final_answer.",
    "planning": {
        "initial_plan": "",
        "update_plan_pre_messages": "",
        "update_plan_post_messages": "",
    },
    "managed_agent": {"task": "", "report": ""},
    "final_answer": {"pre_messages": "Answer without a tool.", "post_messages": "{{task}}"},
}


def solve(question: str, base_url: str, api_key: str, model: str, mcp_url: str) -> str:
    """Return the agent's final answer, or an empty string if the agent fails."""
    server = {
        "transport": "streamable-http",
        "url": mcp_url,
        "headers": {"authorization": f"Bearer {api_key}"},
    }
    with MCPClient(server, structured_output=False) as tools:
        agent = ToolCallingAgent(
            tools=tools,
            model=OpenAIServerModel(model, api_base=base_url, api_key=api_key),
            prompt_templates=TEMPLATES,
            max_steps=MAX_STEPS,
            verbosity_level=LogLevel.OFF,
        )
        try:
            return str(agent.run(question))
        except TypeError:
            # smolagents 1.26 raises TypeError for text that looks like a call without a name.
            return ""


def main() -> None:
    """Print the answer to the task in LUDUS_TASK."""
    answer = solve(
        json.loads(os.environ["LUDUS_TASK"])["text"],
        os.environ["OPENAI_BASE_URL"],
        os.environ["OPENAI_API_KEY"],
        os.environ["OPENAI_MODEL"],
        os.environ["LUDUS_MCP_URL"],
    )
    print(json.dumps({"answer": answer}))


if __name__ == "__main__":
    main()
