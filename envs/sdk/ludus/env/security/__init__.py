"""Who may call, and over what: TLS, tokens, signed session ids, and traces of calls."""
