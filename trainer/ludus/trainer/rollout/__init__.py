"""Playing episodes with a language model: chat, engines, episodes, groups."""
