"""Models that `ludus model get` can fetch: their pinned sources, and the download."""
