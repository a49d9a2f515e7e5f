"""The command `llm` with a configured model; needs llm."""

import json
import os
import subprocess
import sys
from pathlib import Path

URL = os.environ.get("POLYDRAFT_URL", "http://localhost:8000")
MODEL = os.environ.get("POLYDRAFT_MODEL", "polydraft-demo")
KEY = os.environ.get("POLYDRAFT_API_KEY", "none")
QUESTION = "What is the weather in Paris?"

home = Path(os.environ.get("TMPDIR", "/tmp")) / "polydraft-llm-client"
home.mkdir(exist_ok=True)
entry = {"model_id": "polydraft", "model_name": MODEL, "api_base": f"{URL}/v1", "api_key_name": "polydraft"}
(home / "extra-openai-models.yaml").write_text(json.dumps([entry]))
command = [sys.executable, "-m", "llm", "-m", "polydraft", "--key", KEY, "-o", "max_tokens", "24", QUESTION]
run = subprocess.run(
    command, env={**os.environ, "LLM_USER_PATH": str(home)}, capture_output=True, text=True, check=False
)
print(run.stdout, run.stderr)
sys.exit(run.returncode)
