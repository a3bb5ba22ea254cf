"""Load from a process of its own: closed loop (so many clients) and open loop (Poisson arrivals), over plain HTTP.

    python -m benchmarks.serving_load < JSON > JSON

Standard input holds `url`, `path`, `bodies` (strings, posted in turn), `clients`, `seconds`, `rate_per_s` (null: closed
loop), `seed`. With `task` it is `bertship.Client` that asks, and `bodies` are columns. Standard output gets requests,
seconds, errors and latencies in ms. An open-loop latency counts from when the request was due, not from when a thread
was free to send it.
"""

import http.client
import itertools
import json
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

WARM_REQUESTS = 3  # a client


def run(job: dict[str, Any]) -> dict[str, Any]:
    bodies = itertools.cycle(job["bodies"])
    lock, latencies, errors = threading.Lock(), list[float](), list[str]()
    rate, seconds = job.get("rate_per_s"), job["seconds"]
    start = threading.Barrier(job["clients"] + 1)
    due: list[float] = []
    begin = 0.0
    if rate:
        rng, at = random.Random(job.get("seed", 0)), 0.0
        while at < seconds:
            due.append(at)
            at += rng.expovariate(rate)
    arrivals = iter(due)

    def client() -> None:
        ask = _asker(job)
        for body in itertools.islice(job["bodies"], WARM_REQUESTS):
            ask(body)
        start.wait()
        start.wait()
        while True:
            with lock:
                body, arrival = next(bodies), next(arrivals, None) if rate else None
            if rate:
                if arrival is None:
                    return
                # every thread waits for its own arrival, so at most `clients` requests are on their way
                time.sleep(max(0.0, begin + arrival - time.monotonic()))
                since = begin + arrival
            else:
                since = time.monotonic()
                if since > begin + seconds:
                    return
            try:
                ask(body)
            except Exception as error:  # counted, and shown by the caller
                with lock:
                    errors.append(f"{type(error).__name__}: {error}")
            with lock:
                latencies.append((time.monotonic() - since) * 1e3)

    threads = [threading.Thread(target=client) for _ in range(job["clients"])]
    for thread in threads:
        thread.start()
    start.wait()
    begin = time.monotonic()
    start.wait()
    for thread in threads:
        thread.join()
    took = time.monotonic() - begin
    return {"requests": len(latencies), "seconds": took, "errors": errors[:5], "failed": len(errors), "ms": latencies}


def _asker(job: dict[str, Any]) -> Callable[[Any], Any]:
    if task := job.get("task"):
        from bertship.client import Client

        client = Client(job["url"], timeout_s=120)
        return lambda columns: client.infer(task, columns)
    connection = http.client.HTTPConnection(job["url"].removeprefix("http://"), timeout=120)

    def post(body: str) -> bytes:
        connection.request("POST", job["path"], body.encode(), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        content = reply.read()
        if reply.status != 200:
            raise OSError(f"status {reply.status}: {content[:200]!r}")
        return content

    return post


if __name__ == "__main__":
    json.dump(run(json.load(sys.stdin)), sys.stdout)
