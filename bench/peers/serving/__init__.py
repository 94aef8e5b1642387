"""Programs that run inside a peer's own environment: engines without an HTTP server get the smallest one that streams."""
