"""`make test-image`: the Dockerfile's steps in a fresh environment, then its entry point and health check.

For machines without docker. Every path of the image (/opt/venv, /app, /cache) becomes one in a temporary folder; users
are not made. The build arguments TORCH and PIP_ARGS are taken from the environment.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import dockerfile  # noqa: E402

IMAGE_ONLY = ("useradd", "chown", "rm -rf /var/lib")  # commands that concern the image's own system
PATHS = re.compile(r"(?<![\w.])/(opt/venv|app|cache|run/headrace)\b")
START = 120.0  # seconds


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="image-") as folder:
        image = Image(Path(folder))
        for instruction in dockerfile.read():
            image.do(instruction)
        return image.check()


class Image:
    """What the steps have made so far."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cwd = root
        keep = {k: v for k, v in os.environ.items() if k.startswith("PIP_") or k.lower().endswith("_proxy") or "CERT" in k}
        python = str(Path(getattr(sys, "_base_executable", sys.executable)).parent)
        self.env = {"PATH": f"{python}:/usr/bin:/bin", "HOME": str(root / "home"), **keep}
        (root / "home").mkdir()
        self.entrypoint: list[str] = []
        self.health: list[str] = []

    def do(self, step: dockerfile.Instruction) -> None:
        """Carry one instruction out."""
        if step.name == "ARG":
            name, _, value = step.value.partition("=")
            self.env[name] = os.environ.get(name, value)
        elif step.name == "ENV":
            for pair in step.words:
                name, _, value = pair.partition("=")
                self.env[name] = self.here(re.sub(r"\$(\w+)", lambda m: self.env.get(m[1], ""), value))
        elif step.name == "WORKDIR":
            self.cwd = Path(self.here(step.value))
            self.cwd.mkdir(parents=True)
        elif step.name == "COPY":
            self.copy(step.words)
        elif step.name == "RUN":
            commands = " && ".join(c for c in step.value.split(" && ") if not c.startswith(IMAGE_ONLY))
            if commands.startswith("apt-get") and os.geteuid() != 0:
                print(f"not run, as it needs root: {commands}", flush=True)
                return
            print(f"RUN {commands}", flush=True)
            subprocess.run(["sh", "-ec", self.here(commands)], cwd=self.cwd, env=self.env, check=True)
        elif step.name == "ENTRYPOINT":
            self.entrypoint = step.words
        elif step.name == "HEALTHCHECK":
            self.health = dockerfile.health_command(step.value)

    def here(self, text: str) -> str:
        """Paths of the image as paths in the temporary folder."""
        return PATHS.sub(lambda m: f"{self.root}/{m[1]}", text)

    def copy(self, words: list[str]) -> None:
        *sources, target = words
        for source in sources:
            to = self.cwd / target / source if len(sources) > 1 or target.endswith("/") else self.cwd / target
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, to, ignore=shutil.ignore_patterns("__pycache__", "*_pb2*"))
            else:
                shutil.copy(ROOT / source, to)

    def check(self) -> int:
        """Start the entry point on a free port, ask for its health, stop it."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        server = subprocess.Popen([*self.entrypoint, "--port", port], cwd=self.cwd, env=self.env)
        health = [part.replace("3000", port) for part in self.health]
        try:
            end = time.monotonic() + START
            while subprocess.run(health, env=self.env, check=False, capture_output=True).returncode:
                if server.poll() is not None or time.monotonic() > end:
                    print("error: the image's server does not become ready")
                    return 1
                time.sleep(1)
        finally:
            server.send_signal(signal.SIGTERM)
            status = server.wait(120)
        print("the image's steps work" if status == 0 else f"error: the server ended with status {status}")
        return status


if __name__ == "__main__":
    sys.exit(main())
