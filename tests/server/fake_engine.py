"""An engine process without a model: one token for each request.

Its times are arguments, and it starts in a tenth of the time of a real one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import zmq

from engine.api import Failed, Ready, StepResults, Stop, Submit, decode_launch, decode_to_engine, encode
from tests.server.step_results import facts, outcome, stats

_NAME = "tests.server.fake_engine"
_ROOT = Path(__file__).resolve().parents[2]


def start_fake(load_s: float = 0.0, stop_s: float = 0.0, failure: str = "") -> subprocess.Popen[bytes]:
    """Start it; load_s, stop_s: until it is ready, and from a `Stop` to its end."""
    words = [sys.executable, "-m", _NAME, str(load_s), str(stop_s), failure]
    return subprocess.Popen(words, stdin=subprocess.PIPE, cwd=_ROOT)


def main() -> int:
    """Load, or fail, and answer until a `Stop`."""
    load_s, stop_s, failure = sys.argv[1:]
    message = sys.stdin.buffer.read()
    if not message:
        return 0
    launch = decode_launch(message)
    context = zmq.Context()
    inbox = context.socket(zmq.PULL)
    outbox = context.socket(zmq.PUSH)
    inbox.connect(launch.inbox)
    outbox.connect(launch.outbox)
    time.sleep(float(load_s))
    if failure:
        outbox.send(encode(Failed(failure, 1)))
    else:
        outbox.send(encode(Ready(facts())))
        answer(inbox, outbox)
        time.sleep(float(stop_s))
    context.destroy(linger=1000)
    return 1 if failure else 0


def answer(inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
    """Answer requests until a `Stop`, or until the parent has ended."""
    parent = os.getppid()
    num_prompt_tokens = 0
    while os.getppid() == parent:
        if not inbox.poll(100):
            continue
        message = decode_to_engine(inbox.recv())
        if isinstance(message, Stop):
            return
        if not isinstance(message, Submit):
            continue
        for request in message.requests():
            length = len(request.prompt_token_ids)
            num_prompt_tokens += length
            result = msgspec.structs.replace(
                outcome(1, 0, 0), request_id=request.request_id, token_ids=[length], finish_reason="length"
            )
            counted = msgspec.structs.replace(stats(), num_cache_queries=num_prompt_tokens, num_running=0)
            outbox.send(encode(StepResults([result], counted)))


if __name__ == "__main__":
    sys.exit(main())
