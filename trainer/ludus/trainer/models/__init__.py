"""Language models and their words: loading, making, chat."""
