"""Fixtures for episodes of agents: a blackjack server, its client and a tokenizer."""

from tests.rollout.conftest import chat, client, server

__all__ = ["chat", "client", "server"]
