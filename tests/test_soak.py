"""srv.8: memory of the server's processes is flat after requests of ten thousand shapes. Minutes long, so marked slow.

`BERTSHIP_SOAK_REQUESTS` changes the number of requests, a hundred thousand by default.
"""

import http.client
import json
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from small_repository import make_export, serving

from serving import environment
from serving.memory import memory_of
from serving.repository import render

REQUESTS = int(os.environ.get("BERTSHIP_SOAK_REQUESTS", "100000"))
CLIENTS = 8
LENGTHS, COUNTS = range(1, 511), range(1, 21)  # tokens of a request's longest text, and its texts


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_memory_is_flat_after_ten_thousand_shapes(tmp_path):
    render(make_export(tmp_path / "export", "sentence", max_tokens=512), tmp_path / "repository")
    shapes = [(count, length) for count in COUNTS for length in LENGTHS]
    random.Random(0).shuffle(shapes)
    done, lock, failed = 0, threading.Lock(), []
    samples: list[tuple[int, float]] = []

    def client(which):
        nonlocal done
        connection = http.client.HTTPConnection(server.http_url.removeprefix("http://"), timeout=120)
        for i in range(which, REQUESTS, CLIENTS):
            count, length = shapes[i % len(shapes)]
            # one long text; the others are short, so that the time is not spent in the encoder
            data = ["a " * length, *["b"] * (count - 1)]
            body = {"inputs": [{"name": "TEXT", "shape": [count], "datatype": "BYTES", "data": data}]}
            connection.request("POST", "/v2/models/moods/infer", json.dumps(body))
            reply = connection.getresponse()
            content = reply.read()
            with lock:
                done += 1
                if reply.status != 200:
                    failed.append(content[:200])
                if done % max(1, REQUESTS // 100) == 0:
                    samples.append((done, sum(size["rss_mib"] for size in memory_of(server.pid).values())))

    started = time.monotonic()
    with serving(environment.prepare(), tmp_path / "repository") as server:
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(client, range(CLIENTS)))
        by_model = memory_of(server.pid)
    numbers, memory = np.array(samples).T
    late = numbers > REQUESTS / 2
    slope = np.polyfit(numbers[late], memory[late], 1)[0] * REQUESTS / 2
    print(
        f"{done} requests of {min(len(shapes), REQUESTS)} shapes in {time.monotonic() - started:.0f} s; resident MiB: "
        f"{memory[0]:.0f} at first, {memory[late][0]:.0f} half-way, {memory[-1]:.0f} at last, "
        f"{slope:+.2f} in the last half by its trend; {by_model}"
    )
    assert not failed and done == REQUESTS
    # of some 500 MiB: one per cent, which a leak of 100 bytes a request would exceed
    assert abs(slope) < 5 and memory[late].max() - memory[late].min() < 10
