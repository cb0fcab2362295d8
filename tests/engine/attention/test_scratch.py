"""The kernels' scratch memory is not reused by other threads before they are done."""

from __future__ import annotations

import os
import subprocess
import sys

_ATTEND_AGAIN_AND_AGAIN = """
import torch
from engine.attention import AttentionMetadata
from engine.attention.cpu import CpuAttention
from engine.attention.reference import ReferenceAttention

requests, length, heads, dim, block = 16, 24, 8, 64, 16
tokens = requests * length
query, key, value = (torch.randn(tokens, heads, dim) for _ in range(3))
tables = torch.arange(2 * requests, dtype=torch.int32).view(requests, 2)
metadata = AttentionMetadata(
    query_start_loc=torch.arange(0, tokens + 1, length, dtype=torch.int32),
    seq_lens=torch.full((requests,), length, dtype=torch.int32),
    block_tables=tables,
    slot_mapping=(torch.arange(length) + 2 * block * torch.arange(requests)[:, None]).flatten(),
    max_query_len=length,
    max_seq_len=length,
)
def attend(backend):
    cache = torch.zeros(2 * requests, 1, 2, heads, block, dim)
    return backend.forward(
        query, key, value, cache, layer=0, metadata=metadata, scale=dim**-0.5, sliding_window=None
    )

expected = attend(ReferenceAttention())
torch.set_num_threads(4)
for _ in range(100):
    torch.testing.assert_close(attend(CpuAttention()), expected, rtol=1e-4, atol=1e-5)
print("exact")
"""


def test_threads_that_share_one_heap_do_not_share_scratch() -> None:
    # With an arena for each thread, memory that one has freed too early is seldom another's at once.
    one_heap = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1", "OMP_WAIT_POLICY": "passive"}
    ran = subprocess.run(
        [sys.executable, "-c", _ATTEND_AGAIN_AND_AGAIN],
        env={**os.environ, **one_heap},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (ran.returncode, ran.stdout) == (0, "exact\n"), ran.stderr
