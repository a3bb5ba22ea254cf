"""train/memory.py: freed memory is kept inside the block, given back after it, and left alone where it is not ours."""

import subprocess
import sys

import pytest

# Pages are counted in a process of its own: what others have freed there would be taken first.
COUNT = """
import numpy as np, resource
from train.memory import kept_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        np.ones(64 << 20, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20

outside = faults()
with kept_memory():
    np.ones(64 << 20, np.uint8)
    inside, held = faults(), resident()
print(outside, inside, faults(), held - resident())
"""


def count(**environment: str) -> list[int]:
    import os

    done = subprocess.run(
        [sys.executable, "-c", COUNT], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc is Linux's")
def test_memory_is_kept_inside_and_given_back_after() -> None:
    outside, inside, after, given_back = count()
    assert inside < outside / 5 and inside < after / 5
    assert given_back >= 60  # MiB, of the 64 that were held


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc is Linux's")
def test_a_users_own_settings_stay() -> None:
    outside, inside, _, _ = count(MALLOC_MMAP_THRESHOLD_="65536")
    assert inside > outside / 2
