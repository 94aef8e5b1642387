"""schemathesis: requests made up from the OpenAPI document; none may be answered with a server error."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

URL = sys.argv[1]
program = Path(sys.executable).with_name("schemathesis")
done = subprocess.run(
    [str(program), "run", f"{URL}/openapi.json", "--checks", "not_a_server_error", "--max-examples", "15",
     "--phases", "examples,coverage,fuzzing", "--max-time", "90", "--continue-on-failure", "--seed", "1", "--no-color",
     "--suppress-health-check", "filter_too_much"],
    capture_output=True, text=True, check=False, cwd=tempfile.mkdtemp(),  # it leaves a folder where it runs
)
failures = re.findall(r"(?m)^_+ (.+?) _+$", done.stdout)
for name in sorted(set(failures)):
    print(json.dumps({"check": name, "ok": False, "why": done.stdout[-2000:]}))
if not failures:
    ok = done.returncode == 0
    why = {} if ok else {"why": (done.stdout + done.stderr)[-2000:]}
    print(json.dumps({"check": "no made-up request is answered with a server error", "ok": ok, **why}))
