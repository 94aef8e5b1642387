"""The router: HTTP in, text out; it queues and batches requests for one engine. Never imports torch."""

import mimetypes

# aiohttp has the system's tables of file types read, twice, when it is imported. No file is served: none is needed.
mimetypes.knownfiles.clear()
