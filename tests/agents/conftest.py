"""What episodes of agents need: blackjack, served, and a tokenizer that knows its words."""

from tests.rollout.conftest import chat, client, server

__all__ = ["chat", "client", "server"]
