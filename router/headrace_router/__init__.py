"""The router: HTTP in, text out; it queues and batches requests for one engine. Never imports torch."""

import mimetypes

# aiohttp asks for the system's tables of file types when it is imported. They are read from /etc, twice, and never used:
# no file is served.
mimetypes.init(files=())
