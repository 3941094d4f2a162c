"""Write docs/gateway-configuration.md from the help texts of the gateway, or check it."""

from __future__ import annotations

from configuration_docs import describe_section
from generated_page import write_or_check_page

from ludus.services.gateway.config import GatewayConfig

INTRODUCTION = """# Configuration of a gateway

`ludus gateway --config FILE` reads a TOML file with these fields. The options of the [command]\
(commands.md#ludus-gateway) override its top-level fields; `--env` replaces \
all environments of the file. `--servers`, `--max-sessions` and `--isolation` apply to the targets \
of `--env` only, and are refused without such a target. An unknown field is an error. `null` \
means that the field is not set. A path that starts with `~` begins in the home folder; other \
relative paths begin in the working folder.

```toml
port = 8080
tenants_file = "tenants.toml"

[environments.blackjack]
kind = "subprocess"
target = "openspiel_env"
options = {game = "blackjack"}

[environments.cards]
kind = "static"
addresses = ["grpc://10.0.0.7:18000", "grpc://10.0.0.8:18000"]

[servers]
token_file = "servers.token"

[sessions]
queue_timeout_s = 60
```

Environments of kind `static`, `kubernetes` and `sandbox` need a session key, which their servers \
share: `session_key_file`, or the variable `LUDUS_SESSION_KEY`. [security.md](security.md) \
explains tokens, tenants, keys and TLS. The chart writes this file for a release: \
[kubernetes-values.md](kubernetes-values.md#gateway).

This page is generated: `.venv/bin/python dev/gateway_docs.py`.
"""


def make_page() -> str:
    """Return the text of the page."""
    return INTRODUCTION + "".join(describe_section("Gateway", GatewayConfig, "", level=2))


if __name__ == "__main__":
    write_or_check_page("gateway-configuration.md", make_page())
