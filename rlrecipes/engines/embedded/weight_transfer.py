"""How tensors reach the server from a trainer. Owns unpickling and process groups; refuses to touch the model.

Pickles come from outside: only the names that a pickled tensor needs are resolved, everything else is an error.
"""

from __future__ import annotations

import base64
import binascii
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, distributed_c10d  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous
from torch.multiprocessing.reductions import rebuild_storage_filename

from rlrecipes.weight_sync.handles import retry_slow_sharing

NamedTensors = list[tuple[str, torch.Tensor]]

FLATTENED_BUCKET = "flattened_bucket"


class TransferError(ValueError):
    """Tensors could not be received."""


@dataclass
class BucketEntry:
    """Stands for SGLang's ``FlattenedTensorMetadata``: one tensor of a flattened bucket.

    Attributes:
        name: of the tensor.
        shape, dtype: of the tensor.
        start_idx, end_idx: bytes of the bucket.
        numel: bytes too, in spite of the name.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


@dataclass
class RankTensors:
    """Stands for SGLang's ``LocalSerializedTensor``: one pickled tensor for each tensor-parallel rank."""

    values: list[bytes]


_STAND_INS = {"FlattenedTensorMetadata": BucketEntry, "LocalSerializedTensor": RankTensors}
_DTYPES = {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
_ALLOWED = {
    "torch": _DTYPES | {"Size", "Tensor", "UntypedStorage", "device"},
    "torch.storage": {"UntypedStorage", "TypedStorage"},
    "torch.nn.parameter": {"Parameter"},
    "torch._utils": {"_rebuild_tensor_v2", "_rebuild_parameter"},
    "torch.multiprocessing.reductions": {
        "rebuild_tensor",
        "rebuild_storage_empty",
        "rebuild_typed_storage",
        "rebuild_typed_storage_child",
    },
    "collections": {"OrderedDict"},
    "types": {"SimpleNamespace"},
}


@retry_slow_sharing
def _rebuild_patiently(*arguments: Any) -> Any:
    return rebuild_storage_filename(*arguments)  # type: ignore[no-untyped-call]


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.multiprocessing.reductions", "rebuild_storage_filename"):
            return _rebuild_patiently
        if module.startswith("sglang.srt.") and name in _STAND_INS:
            return _STAND_INS[name]
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if name == "rebuild_storage_fd":
            raise TransferError("tensors are shared by file descriptor; pickle them with sharing strategy file_system")
        raise TransferError(f"the pickle names {module}.{name}, which no tensor needs")


def decode_payload(text: str) -> bytes:
    """Undo base64.

    Raises:
        ValueError: it is not base64.
    """
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise ValueError("Expected base64-encoded bytes") from None


def unpickle_tensors(payload: bytes, load_format: str | None) -> NamedTensors:
    """Read a list of named tensors, or a flattened bucket.

    Args:
        payload: pickled by torch's ForkingPickler, shared memory by file name.
        load_format: None, ``direct`` or ``flattened_bucket``.

    Raises:
        TransferError: it holds something else.
    """
    try:
        content = _unpickle(payload)
        if load_format == FLATTENED_BUCKET:
            return split_bucket(content["flattened_tensor"], content["metadata"])
        if load_format not in (None, "direct"):
            raise TransferError(f"Unknown load_format={load_format}")
        return [(str(name), _to_tensor(value)) for name, value in content]
    except TransferError:
        raise
    except Exception as error:  # anything can be wrong in a pickle
        raise TransferError(f"the tensors cannot be read: {error}") from error


def _unpickle(payload: bytes) -> Any:
    return _TensorUnpickler(io.BytesIO(payload)).load()


def _to_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, RankTensors):
        value = _unpickle(value.values[0])
    if not isinstance(value, torch.Tensor):
        raise TransferError(f"expected a tensor, found {type(value).__name__}")
    return value.detach()


def split_bucket(flat: torch.Tensor, entries: Sequence[BucketEntry]) -> NamedTensors:
    """Cut a uint8 tensor into the tensors it was made of, without copying."""
    return [
        (entry.name, flat[entry.start_idx : entry.end_idx].view(entry.dtype).reshape(entry.shape)) for entry in entries
    ]


class UpdateGroups:
    """Process groups in which a trainer (rank 0) broadcasts weights; all methods block."""

    def __init__(self) -> None:
        self._groups: dict[str, dist.ProcessGroup] = {}

    def join(self, address: str, port: int, rank: int, world_size: int, name: str, backend: str) -> None:
        """Meet the other ranks.

        The group is made beside the default one, by the steps that trainers for SGLang take: both sides must prefix
        the store's keys alike or they never meet.

        Raises:
            TransferError: no meeting.
        """
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            timeout = distributed_c10d.default_pg_timeout
            meeting = rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=timeout)
            store, rank, world_size = next(meeting)
            store.set_timeout(timeout)
            group, _ = distributed_c10d._new_process_group_helper(
                world_size, rank, [], dist.Backend(backend), PrefixStore(name, store),
                group_name=distributed_c10d.GroupName(name),
                timeout=timeout,
            )  # fmt: skip
            distributed_c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
            self._groups[name] = group
        except Exception as error:  # torch raises many kinds
            raise TransferError(f"Failed to initialize custom process group: {error}.") from error

    def leave(self, name: str) -> None:
        """Forget a group.

        Raises:
            TransferError: there is none of that name.
        """
        if name not in self._groups:
            raise TransferError("The group to be destroyed does not exist.")
        dist.destroy_process_group(self._groups.pop(name))

    def receive(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], group_name: str,
        load_format: str | None,
    ) -> NamedTensors:  # fmt: skip
        """Receive tensors that rank 0 broadcasts in this order, or as one bucket.

        Raises:
            TransferError: no such group or dtype, or the broadcast failed.
        """
        group = self._groups.get(group_name)
        if group is None:
            raise TransferError(
                f"Group {group_name} not in {list(self._groups)}. Please call `init_weights_update_group` first."
            )
        unknown = [name for name in dtypes if name not in _DTYPES]
        if unknown or not len(names) == len(dtypes) == len(shapes):
            raise TransferError(f"names, dtypes and shapes do not fit together (unknown dtypes: {unknown})")
        tensors = [
            torch.empty(list(shape), dtype=getattr(torch, dtype)) for dtype, shape in zip(dtypes, shapes, strict=True)
        ]
        try:
            if load_format == FLATTENED_BUCKET:
                return self._receive_bucket(names, tensors, group)
            works = [dist.broadcast(tensor, src=0, group=group, async_op=True) for tensor in tensors]
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise TransferError(f"Failed to update parameter online: {error}.") from error
        return list(zip(names, tensors, strict=True))

    def _receive_bucket(
        self, names: Sequence[str], tensors: list[torch.Tensor], group: dist.ProcessGroup
    ) -> NamedTensors:
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=group)
        parts = torch.split(flat, sizes)
        return [
            (name, part.view(tensor.dtype).reshape(tensor.shape))
            for name, part, tensor in zip(names, parts, tensors, strict=True)
        ]
