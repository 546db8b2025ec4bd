"""On a machine with CUDA: what this version says about it."""

import pytest
import torch

import flowdp


@pytest.mark.gpu(1)
def test_a_usable_card_is_listed_with_its_memory():
    first = flowdp.devices().usable[0]
    assert first.device == torch.device("cuda", 0)
    assert first.name in torch.cuda.get_device_name(0)
    assert first.memory_bytes == torch.cuda.get_device_properties(0).total_memory


@pytest.mark.gpu(1)
def test_training_on_a_card_is_refused_with_what_to_do():
    x = torch.zeros(4, 1)
    with pytest.raises(flowdp.OptionError, match="CPU devices only"):
        flowdp.Trainer(
            torch.nn.Linear(1, 1),
            lambda params: torch.optim.SGD(params, lr=0.1),
            lambda model, batch: model(batch[0]).mean(),
            dataset=(x,),
            batch_size=2,
            epochs=1,
            devices=["cuda:0"],
        )
