"""Another server as what a worker lends: found by asking it, spoken to over HTTP, read as Server-Sent Events."""
