"""The router: HTTP in, text out; it queues and batches requests for one engine. Never imports torch."""
