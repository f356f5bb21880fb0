"""One of two processes that broadcast bytes by torch.distributed over NCCL and nothing else, as a reference.

weight_sync_speed.py starts both, each with one GPU. Rank 0 prints GB/s as JSON, by how the bytes are cut: one broadcast
a tensor, or one a bucket.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

MIB = 1 << 20
NUM_WARM_UPS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, choices=(0, 1), required=True)
    parser.add_argument("--port", type=int, required=True, help="free; where the two meet")
    parser.add_argument("--sizes", type=Path, required=True, help="a JSON list of the tensors' bytes")
    parser.add_argument("--bucket-mib", type=int, nargs="+", required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    sizes = json.loads(arguments.sizes.read_text())
    total, is_cuda = sum(sizes), arguments.device == "cuda"
    if is_cuda:
        torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        init_method=f"tcp://127.0.0.1:{arguments.port}",
        rank=arguments.rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    flat = torch.ones(total, dtype=torch.uint8, device=arguments.device)
    cuts = {"tensor by tensor": sizes}
    for bucket_mib in arguments.bucket_mib:
        step = bucket_mib * MIB
        cuts[f"{bucket_mib} MiB at a time"] = [min(step, total - start) for start in range(0, total, step)]
    found: dict[str, list[float]] = {}
    for what, parts in cuts.items():
        for number in range(arguments.repeats + NUM_WARM_UPS):
            time_s = measure(flat.split(parts), is_cuda)
            if number >= NUM_WARM_UPS:
                found.setdefault(what, []).append(total / 1e9 / time_s)
    if arguments.rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def measure(views: tuple[torch.Tensor, ...], is_cuda: bool) -> float:
    """Seconds of one broadcast of each view, all under way at once."""
    dist.barrier()
    if is_cuda:
        torch.cuda.synchronize()
    started_s = time.perf_counter()
    works = [dist.broadcast(view, src=0, async_op=True) for view in views]
    for work in works:
        work.wait()
    if is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
