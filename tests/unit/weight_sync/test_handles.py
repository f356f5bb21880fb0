"""Handles of memory: for each engine rank one, made by the trainer rank on its GPU, of exactly the source's bytes."""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rlrecipes.engines.embedded import weight_transfer
from rlrecipes.engines.sglang.process import find_free_port
from rlrecipes.weight_sync.buckets import to_buckets
from rlrecipes.weight_sync.handles import HandleTransport, SharingEngine, to_payload

TENSORS = [
    ("odd", torch.arange(5, dtype=torch.bfloat16)),
    ("wide", torch.randn(3, 4)),
    ("byte", torch.arange(3, dtype=torch.uint8)),
    ("long", torch.randn(2, 2, dtype=torch.float64)),
]


class Receiver:
    """Reads what it is handed, as SGLang does: every rank its own payload, while the sender still waits."""

    def __init__(self):
        self.received, self.formats = [], []

    async def update_weights_from_tensor(self, payloads, *, load_format=None):
        self.formats.append(load_format)
        self.received.append([read(payload) for payload in payloads])


def read(payload):
    content = pickle.loads(base64.b64decode(payload))
    flat = content["flattened_tensor"]
    return flat, {
        entry.name: flat[entry.start_idx : entry.end_idx].view(entry.dtype).reshape(entry.shape).clone()
        for entry in content["metadata"]
    }


def check(receiver, num_ranks):
    assert set(receiver.formats) == {"flattened_bucket"}
    for rank in range(num_ranks):
        found = {name: value for bucket in receiver.received for name, value in bucket[rank][1].items()}
        assert list(found) == [name for name, _ in TENSORS]
        assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in TENSORS)


def test_a_trainer_alone_hands_over_what_it_has():
    torch.multiprocessing.set_sharing_strategy("file_system")
    receiver = Receiver()
    transport = HandleTransport([SharingEngine(receiver, (0,))], device="cpu")

    async def send():
        for bucket in to_buckets(iter(TENSORS), bucket_bytes=64):
            await transport.send(bucket)

    asyncio.run(send())
    assert len(receiver.received) == 2
    check(receiver, 1)


def run_rank(rank, port, source, results):
    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy("file_system")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    both, second = Receiver(), Receiver()
    engines = [SharingEngine(both, (0, 1)), SharingEngine(second, (1,))]
    transport = HandleTransport(engines, device="cpu")
    made = []
    original = transport._share
    transport._share = lambda flat, tensors, source: made.append(flat.data_ptr()) or original(flat, tensors, source)

    async def send():
        for bucket in to_buckets(iter(TENSORS), bucket_bytes=64):
            await transport.send(bucket)
        transport.end()

    if rank == source:
        asyncio.run(send())
        check(both, 2)
        check(second, 1)
        # Each engine rank got memory of its own trainer rank, not twice the source's.
        assert all(first[0].data_ptr() != other[0].data_ptr() for first, other in both.received)
    else:
        while transport.relay(source):
            pass
        assert (both.received, second.received) == ([], [])
    results.put((rank, len(made)))
    dist.barrier()
    dist.destroy_process_group()


def test_every_engine_rank_gets_memory_of_the_trainer_rank_on_its_gpu():
    context = torch.multiprocessing.get_context("spawn")
    for source in (0, 1):
        port, results = find_free_port(), context.SimpleQueue()
        processes = [context.Process(target=run_rank, args=(rank, port, source, results)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(90)
        assert [process.exitcode for process in processes] == [0, 0]
        assert sorted(results.get() for _ in range(2)) == [(0, 2), (1, 2)]


def test_a_handle_names_its_gpu_by_uuid(monkeypatch):
    """Numbers of GPUs differ between a trainer that sees one and an engine that sees several."""
    from rlrecipes.weight_sync import handles

    class OnGpu(torch.Tensor):
        is_cuda = True

    told = []
    arguments = ("kind", "size", "stride", "offset", "storage", "dtype", 3, "handle", "and more")
    monkeypatch.setattr(handles, "reduce_tensor", lambda tensor: (told.append, arguments))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-of-mine"))
    tensor = torch.ones(2).as_subclass(OnGpu)
    _, found = handles._HandlePickler(io.BytesIO()).reducer_override(tensor)
    assert found == (*arguments[:6], "GPU-of-mine", *arguments[7:])


def test_a_slow_keeper_of_shared_memory_is_asked_again(monkeypatch):
    """Both sides meet it; torch itself gives up after a second, with these words first."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    asked = []

    def slow(function):
        def answer(*arguments):
            asked.append(function.__name__)
            if asked.count(function.__name__) < 3:
                raise RuntimeError("Shared memory manager connection has timed out\nException raised from recv")
            return function(*arguments)

        return answer

    storage = torch.UntypedStorage
    monkeypatch.setattr(storage, "_share_filename_cpu_", slow(storage._share_filename_cpu_))
    monkeypatch.setattr(weight_transfer, "rebuild_storage_filename", slow(weight_transfer.rebuild_storage_filename))
    tensor = torch.arange(5.0)
    payload = to_payload([("a", tensor)])
    ((name, found),) = weight_transfer.unpickle_tensors(weight_transfer.decode_payload(payload), None)
    assert (name, found.tolist()) == ("a", tensor.tolist())
    assert len(asked) == 6 and len(set(asked)) == 2


def test_another_fault_of_shared_memory_is_told_at_once(monkeypatch):
    torch.multiprocessing.set_sharing_strategy("file_system")

    def fail(*_):
        raise RuntimeError("no space left on device")

    monkeypatch.setattr(torch.UntypedStorage, "_share_filename_cpu_", fail)
    with pytest.raises(RuntimeError, match="no space left"):
        to_payload([("a", torch.arange(5.0))])
