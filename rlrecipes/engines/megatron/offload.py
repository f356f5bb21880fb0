"""Memory of a device given back and taken again, contents and addresses of Python objects kept.

Tensors of a trainer are views of one another: parameters lie in the buffer of Megatron's DDP, gradients in another, and
optimizers step slices of both. So storages are emptied and refilled, and no tensor is replaced: every view sees its
bytes again, and nothing has to know who holds which. Reading a tensor in between is an error that torch does not find.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def find_storages(tensors: Iterable[Tensor], device_type: str) -> dict[int, torch.UntypedStorage]:
    """Storages under some tensors, each once, by their identity; empty ones and those elsewhere left out.

    Args:
        tensors: views of one storage count once.
        device_type: ``cuda`` or ``cpu``: where a storage must lie.
    """
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {
        storage._cdata: storage for storage in storages if storage.device.type == device_type and storage.nbytes() > 0
    }


class OffloadedStorages:
    """Storages that come and go together.

    Contents are copied to one block of the host's memory, page-locked where there is a GPU. It is made at the first
    :meth:`offload` and kept: locking pages anew would take longer than the copies.

    Args:
        storages: from :func:`find_storages`.
        should_keep: whether contents are kept; otherwise they come back as zeros, and no host memory is used.
    """

    def __init__(self, storages: Mapping[int, torch.UntypedStorage], *, should_keep: bool = True) -> None:
        self.keys = frozenset(storages)
        self._storages = [(storage, storage.nbytes()) for storage in storages.values()]
        self._is_on_gpu = any(storage.device.type == "cuda" for storage, _ in self._storages)
        self._should_keep = should_keep
        self._host: Tensor | None = None
        self.is_offloaded = False

    @property
    def num_bytes(self) -> int:
        """Of all storages."""
        return sum(size for _, size in self._storages)

    def offload(self) -> None:
        """Copy contents to the host and free the device's memory to torch's allocator; nothing where that is done.

        Raises:
            MemoryError: the host cannot lock so much memory.
        """
        if self.is_offloaded:
            return
        if self._should_keep:
            if self._host is None:
                self._host = self._allocate_on_host()
            for view, copy in self._pair(self._host):
                copy.copy_(view, non_blocking=True)
        self._wait()  # for copies, and for whatever still computes with these
        for storage, _ in self._storages:
            storage.resize_(0)
        self.is_offloaded = True

    def reload(self) -> None:
        """Take memory again and fill it as it was; nothing where nothing is offloaded."""
        if not self.is_offloaded:
            return
        for storage, size in self._storages:
            storage.resize_(size)
        if self._host is not None:
            for view, copy in self._pair(self._host):
                view.copy_(copy, non_blocking=True)
        else:
            for storage, _ in self._storages:
                _view_bytes(storage).zero_()
        self._wait()
        self.is_offloaded = False

    def forget(self) -> None:
        """Give the host's memory back; not while anything is offloaded."""
        if self._host is not None and self._is_on_gpu:
            _cudart().cudaHostUnregister(self._host.data_ptr())
        self._host = None

    def _pair(self, host: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        parts = torch.split(host, [size for _, size in self._storages])
        return ((_view_bytes(storage), part) for (storage, _), part in zip(self._storages, parts, strict=True))

    def _allocate_on_host(self) -> Tensor:
        # Torch's own allocator of page-locked memory rounds up to a power of two.
        host = torch.empty(self.num_bytes, dtype=torch.uint8)
        if self._is_on_gpu and int(_cudart().cudaHostRegister(host.data_ptr(), self.num_bytes, 0)):
            raise MemoryError(f"the host cannot lock {self.num_bytes / 1e9:.1f} GB of memory")
        return host

    def _wait(self) -> None:
        if self._is_on_gpu:
            torch.cuda.synchronize()


def _view_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
