"""A few hundred mixed calls. `mixed_calls.py` makes any number of them, with larger tensors."""

import random

import mixed_calls
import pytest

from torchrpc.testing import workers


@pytest.mark.parametrize("threads", [1, 16])
def test_mixed_calls_return_the_results_of_local_calls(threads):
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    with workers(2, num_worker_threads=threads):
        counts = mixed_calls.run(200, seed, 1 << 20)
    assert set(mixed_calls.KINDS) < set(counts)
