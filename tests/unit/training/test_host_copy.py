import pytest
import torch

from tandem.training.checkpoint import host_copy
from tandem.training.checkpoint.host_copy import HostCopier, PinnedMemory
from tandem.training.checkpoint.parts import Part

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("reserved", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_is_not_changed_by_later_updates(device, reserved):
    weight = torch.nn.Parameter(torch.zeros(4096, 4096, device=device))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    copier = HostCopier(torch.device(device), optimizer)
    count, random = torch.tensor(0.0, device=device), torch.tensor([1, 2, 3], dtype=torch.uint8)
    parts = {"weight": Part(weight.detach(), first=7), "count": Part(count), "random": Part(random)}
    if reserved:
        copier.reserve(parts)
    for step in range(1, 5):
        count += 1
        weight.grad = torch.full_like(weight, -1.0)
        optimizer.step()
        copy = copier.copy(parts)
        for _ in range(3):  # at once: on a GPU the copy has hardly begun
            optimizer.step()
        arrived = copy.arrived()
        assert arrived["weight"].tensor.device.type == "cpu"
        assert arrived["weight"].first == 7
        assert arrived["count"].tensor == step
        assert arrived["random"].tensor.tolist() == [1, 2, 3]
        assert torch.equal(arrived["weight"].tensor, torch.full((4096, 4096), 4.0 * step - 3))
    copier.close()


@pytest.mark.gpu
def test_memory_is_pinned_and_released():
    shapes = {"large": (5, 4096, 4096), "small": (3,), "nothing": (0, 8), "scalar": ()}
    memory = PinnedMemory({name: torch.zeros(shape, device="cuda") for name, shape in shapes.items()})
    assert {name: tuple(place.shape) for name, place in memory.places.items()} == shapes
    large = memory.places["large"]
    assert large.is_pinned()
    memory.release()
    assert not large.is_pinned()


@pytest.mark.gpu
def test_memory_that_is_dropped_is_not_pinned_any_more():
    memory = PinnedMemory({"large": torch.zeros(5, 4096, 4096, device="cuda")})
    large = memory.places["large"]
    del memory
    assert not large.is_pinned()


@pytest.mark.parametrize("way", ["released", "dropped"])
def test_all_pinned_memory_is_unpinned(way, monkeypatch):
    pinned: list[int] = []

    class Driver:
        @staticmethod
        def cudaHostRegister(address: int, size: int, flags: int) -> int:
            pinned.append(address)
            return 0

        cudaHostUnregister = staticmethod(pinned.remove)

    monkeypatch.setattr(host_copy, "_driver", lambda: Driver)
    memory = PinnedMemory({"large": torch.zeros(5, 4096, 4096), "small": torch.zeros(3)})
    assert pinned
    if way == "released":
        memory.release()
    del memory
    assert not pinned
