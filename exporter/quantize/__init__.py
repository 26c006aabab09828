"""Weight-only quantisation: formats, methods, ingestion of quantised checkpoints, and how graphs hold them."""
