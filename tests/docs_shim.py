"""`bertship` for the commands of the documentation: the same program, its trainings and measurements made short.

Fields that a page sets itself, or that would take minutes, are set again behind the page's own options, where the last
one counts. A server takes free ports, and commands that would ask the usual address ask the server of these runs, else
the tests' own.
"""

import json
import os
import sys
from pathlib import Path

from bertship.cli import main

SETTINGS = {
    "pretrain": ("steps=2", "batch_size=8", "sequence_length=32", "warmup_steps=1", "heldout_batches=1"),
    "finetune": ("min_updates=2", "epochs=0.01", "precision=fp32"),
    "corpus": ("vocab_size=256",),
}
OPTIONS = {
    "bench-engine": ("--seconds", "0.01", "--batch", "1", "--length", "16,32"),
    "serve": ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"),
}
STATE = Path("runs/serve/server.json")

if __name__ == "__main__":
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    more = [word for pair in SETTINGS.get(command, ()) for word in ("--set", pair)] + list(OPTIONS.get(command, ()))
    if "--tokenizer" in sys.argv:  # a vocabulary that is given has its size
        more = []
    if "--init" not in sys.argv and command == "finetune":
        more += ["--init", "start"]
    if command in ("health", "ask"):
        own = json.loads(STATE.read_text(encoding="utf-8")) if STATE.is_file() else {}
        more += ["--url", own.get("http_url", os.environ["SERVER_URL"])]
    sys.argv += more
    main()
