import pytest
import torch

from tandem.train.host_copy import HostCopier

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_holds_the_weights_as_they_were_though_the_run_goes_on(device):
    weight = torch.nn.Parameter(torch.zeros(4096, 4096, device=device))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    copier = HostCopier(torch.device(device), optimizer)
    tensors = {"weight": weight.detach(), "count": torch.tensor(0.0, device=device)}
    for step in range(1, 5):
        tensors["count"] += 1
        weight.grad = torch.full_like(weight, -1.0)
        optimizer.step()
        copy = copier.copy(tensors)
        for _ in range(3):  # at once: on a GPU the copy has hardly begun
            optimizer.step()
        arrived = copy.arrived()
        assert arrived["weight"].device.type == "cpu"
        assert arrived["count"] == step
        assert torch.equal(arrived["weight"], torch.full((4096, 4096), 4.0 * step - 3))
