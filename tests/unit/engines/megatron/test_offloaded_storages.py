"""Memory that goes and comes back: every view sees its bytes again, and in between the memory is free."""

from __future__ import annotations

import torch

from rlrecipes.engines.megatron.offload import OffloadedStorages, find_storages


def test_views_of_one_storage_are_one_and_see_their_bytes_again() -> None:
    buffer = torch.randn(1000)
    parameter, shard = torch.nn.Parameter(buffer[:600].view(20, 30)), buffer[300:700]
    moment = torch.randn(7, dtype=torch.float64)
    found = find_storages([buffer, parameter, shard, moment], "cpu")
    expected = [tensor.detach().clone() for tensor in (buffer, parameter, shard, moment)]
    storages = OffloadedStorages(found)
    assert storages.num_bytes == 4000 + 56
    for _ in range(2):  # the host's copy is used again
        storages.offload()
        assert storages.is_offloaded
        assert buffer.untyped_storage().nbytes() == moment.untyped_storage().nbytes() == 0
        assert parameter.shape == (20, 30)
        storages.reload()
        for tensor, wanted in zip((buffer, parameter, shard, moment), expected, strict=True):
            assert torch.equal(tensor.detach(), wanted)
        assert parameter.data_ptr() == buffer.data_ptr()
        with torch.no_grad():
            parameter[0, 0] += 1
        expected[0][0] = expected[1][0, 0] = parameter[0, 0].item()
        assert buffer[0] == parameter[0, 0]


def test_what_need_not_be_kept_comes_back_as_zeros() -> None:
    gradient = torch.randn(50)
    storages = OffloadedStorages(find_storages([gradient], "cpu"), should_keep=False)
    storages.offload()
    assert gradient.untyped_storage().nbytes() == 0
    storages.reload()
    assert torch.equal(gradient, torch.zeros(50))


def test_doing_it_twice_does_nothing() -> None:
    tensor = torch.arange(5)
    storages = OffloadedStorages(find_storages([tensor], "cpu"))
    storages.reload()
    storages.offload()
    storages.offload()
    storages.reload()
    storages.reload()
    assert tensor.tolist() == [0, 1, 2, 3, 4]


def test_tensors_elsewhere_and_empty_ones_stay_out() -> None:
    assert find_storages([torch.ones(3), torch.ones(0)], "cuda") == {}
    assert find_storages([torch.ones(0)], "cpu") == {}
