"""Tests of the reported topology on a machine with CUDA."""

import pytest
import torch

import flowdp


@pytest.mark.gpu(1)
def test_a_usable_card_is_listed_with_its_memory():
    first = flowdp.devices().usable[0]
    assert first.device == torch.device("cuda", 0)
    assert first.name in torch.cuda.get_device_name(0)
    assert first.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert first.name.removeprefix("NVIDIA ") in str(flowdp.devices())


@pytest.mark.gpu(2)
def test_peers_are_those_that_the_driver_names():
    for info in flowdp.devices().usable:
        for other in range(torch.cuda.device_count()):
            if other != info.device.index:
                reached = torch.cuda.can_device_access_peer(info.device.index, other)
                assert (torch.device("cuda", other) in info.peers) == reached
