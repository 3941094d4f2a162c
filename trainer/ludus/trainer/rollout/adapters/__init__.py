"""The environment as the policy sees it: messages, actions and tool calls."""
