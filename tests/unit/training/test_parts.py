import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.errors import CheckpointError
from tandem.storage.cache import sha256_of
from tandem.training.checkpoint.parts import Part, fill_parts, names_in, other_checkpoint_hint, write_parts


def numbers(*shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).to(dtype)


def shards(tensor, ranks):
    """Shard the rows of a tensor like FSDP: the last ranks have fewer rows, or none."""
    each = -(-len(tensor) // ranks)
    starts = [min(len(tensor), each * rank) for rank in range(ranks)]
    return [Part(tensor[start : start + each].clone(), start) for start in starts]


def test_any_reader_of_safetensors_reads_a_file(tmp_path):
    tensors = {
        "codes": numbers(3, dtype=torch.uint8),  # of three bytes: the next tensor must still be aligned
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
def test_files_of_some_ranks_are_read_by_any_number_of_ranks(before, after, tmp_path):
    weight = numbers(5, 3)
    for number, part in enumerate(shards(weight, before)):
        write_parts(tmp_path / f"rank_{number}.safetensors", {"weight": part, f"own.{number}": Part(numbers(2))})
    for part in shards(weight, after):
        mine = Part(torch.full_like(part.tensor, -1.0), part.first)
        fill_parts(tmp_path, {"weight": mine})
        assert torch.equal(mine.tensor, part.tensor)


def test_a_tensor_is_filled_in_place(tmp_path):
    write_parts(tmp_path / "rank_0.safetensors", {"weight": Part(numbers(2, 2)), "count": Part(torch.tensor(3.0))})
    weight, count = torch.zeros(2, 2), torch.tensor(0.0)
    fill_parts(tmp_path, {"weight": Part(weight), "count": Part(count)})
    assert torch.equal(weight, numbers(2, 2))
    assert count == 3


# Files as a stranger might have written them


def refusal(folder, wanted):
    with pytest.raises(CheckpointError) as refused:
        fill_parts(folder, {"weight": Part(wanted)})
    reported, _, what_to_do = str(refused.value).partition(". ")
    assert what_to_do == other_checkpoint_hint()
    return reported


@pytest.mark.parametrize("rows", [[(0, 2), (3, 5)], [(1, 5)], [(0, 4)], []])
def test_a_tensor_of_which_rows_are_missing_is_refused(tmp_path, rows):
    weight = numbers(5, 3)
    for number, (start, end) in enumerate(rows):
        write_parts(tmp_path / f"rank_{number}.safetensors", {"weight": Part(weight[start:end], start)})
    assert refusal(tmp_path, torch.zeros(5, 3)) == (
        f"{tmp_path}: the tensor weight is incomplete, so no run can resume from this checkpoint"
    )


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        (numbers(5, 2), "shape [5, 2] and dtype F32"),
        (numbers(15), "shape [15] and dtype F32"),
        (torch.tensor(1.0), "shape [] and dtype F32"),
        (numbers(5, 3, dtype=torch.bfloat16), "shape [5, 3] and dtype BF16"),
    ],
)
def test_a_tensor_of_another_shape_or_dtype_is_refused(tmp_path, stored, found):
    file = tmp_path / "rank_0.safetensors"
    write_parts(file, {"weight": Part(stored)})
    assert refusal(tmp_path, torch.zeros(5, 3)) == (
        f"{file}: the tensor weight has {found}, which does not match the model of this run, so the run "
        "cannot resume from this checkpoint"
    )


@pytest.mark.parametrize(
    "metadata",
    [None, {}, {"first_rows": "{"}, {"first_rows": "[" * 100_000}, {"first_rows": "[1]"}]
    + [{"first_rows": f'{{"weight": {row}}}'} for row in ("-1", '"0"', "1.5", "true", "null", "[0]")],
)
def test_a_file_that_does_not_say_which_rows_it_holds_is_refused(tmp_path, metadata):
    file = tmp_path / "rank_0.safetensors"
    save_file({"weight": numbers(5, 3)}, file, metadata=metadata)
    assert refusal(tmp_path, torch.zeros(5, 3)) == (
        f"{file}: the header does not list which rows the file holds, so no run can resume from this checkpoint"
    )


def test_a_file_that_is_not_safetensors_is_refused(tmp_path):
    file = tmp_path / "rank_0.safetensors"
    file.write_bytes(b"\x00" * 8)
    assert refusal(tmp_path, torch.zeros(5, 3)).startswith(f"{file}: Error while deserializing header")
    file.unlink()
    os.mkfifo(file)  # reading it would wait for somebody to write
    assert (
        refusal(tmp_path, torch.zeros(5, 3)) == f"{file}: not a regular file, so no run can resume from this checkpoint"
    )
