import pytest
import torch
from safetensors.torch import load_file

from tandem.cache import sha256_of
from tandem.train.parts import Part, fill_parts, names_in, write_parts


def numbers(*shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).to(dtype)


def shards(tensor, workers):
    """A tensor's rows over workers as FSDP lays them: the last have fewer, or none."""
    each = -(-len(tensor) // workers)
    starts = [min(len(tensor), each * worker) for worker in range(workers)]
    return [Part(tensor[start : start + each].clone(), start) for start in starts]


def test_any_reader_of_safetensors_reads_a_file(tmp_path):
    tensors = {
        "codes": numbers(3, dtype=torch.uint8),  # of three bytes: what follows must not stand crooked for it
        "moment": numbers(5, 2, dtype=torch.bfloat16),
        "count": torch.tensor(4.0),
        "weight": numbers(4, 3),
        "empty": torch.zeros(0, 3),
        "turned": numbers(4, 3).T,
    }
    digest = write_parts(tmp_path / "one.safetensors", {name: Part(tensor) for name, tensor in tensors.items()})
    assert digest == sha256_of(tmp_path / "one.safetensors")
    read = load_file(tmp_path / "one.safetensors")
    assert read.keys() == tensors.keys() == names_in(tmp_path)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name


@pytest.mark.parametrize("before", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_what_some_workers_wrote_any_others_read(before, after, tmp_path):
    weight = numbers(5, 3)
    for number, part in enumerate(shards(weight, before)):
        write_parts(tmp_path / f"worker_{number}.safetensors", {"weight": part, f"own.{number}": Part(numbers(2))})
    for part in shards(weight, after):
        mine = Part(torch.full_like(part.tensor, -1.0), part.first)
        fill_parts(tmp_path, {"weight": mine})
        assert torch.equal(mine.tensor, part.tensor)


def test_a_tensor_is_filled_in_place_and_others_are_left(tmp_path):
    write_parts(tmp_path / "worker_0.safetensors", {"weight": Part(numbers(2, 2)), "count": Part(torch.tensor(3.0))})
    weight, count, other = torch.zeros(2, 2), torch.tensor(0.0), torch.ones(2)
    fill_parts(tmp_path, {"weight": Part(weight), "count": Part(count), "other": Part(other)})
    assert torch.equal(weight, numbers(2, 2))
    assert count == 3
    assert torch.equal(other, torch.ones(2))
