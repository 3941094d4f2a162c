"""Language models: loading, tiny models, chat templates and tokenizers."""
