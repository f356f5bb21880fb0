"""SGLang's two hashes, against what its own code says of the same bytes, however they are cut.

The hash of a GPU runs in Triton's interpreter, in a process of its own: it is chosen when Triton is imported.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import torch

from rlrecipes.weight_sync.tensor_hashes import Sha256Hasher, TileHasher, bring_to_host, build_hasher

OF_A_GPU = {
    1: "3d93a6540b54ef2a",
    3: "1d9f0dfb19964121",
    4: "70ac04b21c46fd41",
    100: "6b6b33f6f6196dba",
    32768: "d13c37d75d6938a3",
    32774: "52b2754ee7702be2",
    200_001: "94fd3a19385a6889",
}
"""Number of bytes -> hash, by the kernel of SGLang 0.5.17 (gpu_tensor_hash) in Triton's interpreter."""


def build_bytes(size):
    return (torch.arange(size) * 2654435761 % 251).to(torch.uint8)


def hash_parts(hasher, parts):
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def test_the_hash_of_a_gpu_is_the_kernels():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


def check_sizes_and_cuts():
    for size, expected in OF_A_GPU.items():
        content = build_bytes(size)
        assert hash_parts(TileHasher(), [content]) == expected, size
        for cuts in ([2, 5, 64, 32766], [40_000, 100_001]):
            parts = torch.tensor_split(content, [cut for cut in cuts if cut < size])
            assert hash_parts(TileHasher(), parts) == expected, (size, cuts)


def check_zeros_count():
    assert hash_parts(TileHasher(), [torch.zeros(5000, dtype=torch.uint8)]) == "9bd287b9a38a3833"
    assert hash_parts(TileHasher(), [torch.zeros(4996, dtype=torch.uint8)]) != "9bd287b9a38a3833"
    assert hash_parts(TileHasher(), [torch.zeros(0, dtype=torch.uint8)]) == f"{0:016x}"


def check_a_tensor_that_begins_between_two_words():
    buffer = torch.arange(101, dtype=torch.bfloat16)
    whole = buffer[1:].clone().view(torch.uint8)
    assert hash_parts(TileHasher(), [buffer[1:].view(torch.uint8)]) == hash_parts(TileHasher(), [whole])


def check_hashers_that_are_read_together():
    hashers = {size: TileHasher() for size in OF_A_GPU}
    for size, hasher in hashers.items():
        for part in torch.tensor_split(build_bytes(size), [cut for cut in (5, 40_000) if cut < size]):
            hasher.update(part)
    bring_to_host([*hashers.values(), Sha256Hasher(), TileHasher()])
    assert {size: hasher.hexdigest() for size, hasher in hashers.items()} == OF_A_GPU


def test_the_hash_of_a_cpu_is_sha256():
    content = build_bytes(1000)
    expected = hashlib.sha256(bytes(content.tolist())).hexdigest()[:16]
    assert hash_parts(Sha256Hasher(), torch.tensor_split(content, [3, 500])) == expected


def test_a_device_chooses():
    assert isinstance(build_hasher("cuda"), TileHasher)
    assert isinstance(build_hasher("cpu"), Sha256Hasher)


if __name__ == "__main__":
    check_sizes_and_cuts()
    check_zeros_count()
    check_a_tensor_that_begins_between_two_words()
    check_hashers_that_are_read_together()
