"""Several ranks each read their own rows of the weights, and end with the model that one rank loads."""

import json
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from killing import SERVER
from models import ARCHITECTURES, model_folder
from torch.distributed.tensor import DTensor

from tandem.config.sections.policy import Policy as PolicyConfig
from tandem.model.distributed.layers import shard
from tandem.model.distributed.mesh import MeshShape
from tandem.model.distributed.process_group import make_ranks
from tandem.model.distributed.sharded_load import read_shards
from tandem.model.files.source import find_model
from tandem.model.load import as_policy, load_policy, unloaded_model

CPU = torch.device("cpu")
# transformers rearranges the weights of experts when it loads them.
REARRANGED = {"qwen3_moe"}


def loaded_both_ways(folder, dtype, shape):
    """The names of tensors that differ between a model read shard by shard and one that is loaded whole."""
    config = PolicyConfig.model_validate({"model_name": str(folder)})
    source = find_model(config)
    published = source.config.dtype
    skeleton = unloaded_model(source, config, dtype)
    assert source.config.dtype == published
    if skeleton is None:
        return None
    whole = load_policy(source, config, CPU, dtype=dtype)
    expected = dict([*whole.named_parameters(), *whole.named_buffers()])
    policy = as_policy(skeleton, source, config, CPU)
    assert all(parameter.is_meta for parameter in policy.parameters())
    ranks = make_ranks(CPU, shape)
    shard(policy, ranks, bfloat16=False, read=lambda: read_shards(source, skeleton, CPU))
    found = dict([*policy.named_parameters(), *policy.named_buffers()])
    tensors = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in found.items()}
    assert tensors.keys() == expected.keys()
    assert all(tensor.requires_grad for name, tensor in policy.named_parameters())
    return [
        name
        for name, tensor in expected.items()
        if tensor.dtype != tensors[name].dtype or not torch.equal(tensor, tensors[name])
    ]


def _rank(number, path, folders, answers):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=number, world_size=2)
    for name, folder in folders.items():
        dtypes = [torch.float32, torch.bfloat16] if name in ("llama", "tied") else [torch.float32]
        shapes = [MeshShape(shard=2), MeshShape(replicate=2)] if name == "llama" else [MeshShape(shard=2)]
        for dtype, shape in product(dtypes, shapes):
            answers.put((name, loaded_both_ways(folder, dtype, shape)))
    answers.put(None)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    folders = {name: model_folder(folder / name, name) for name in ARCHITECTURES}
    folders["tied"] = model_folder(folder / "tied", "llama", tie_word_embeddings=True)
    folders["several files"] = model_folder(folder / "several", "llama")
    split_files(folders["several files"])
    answers = SERVER.SimpleQueue()
    processes.start_processes(
        _rank, (str(folder / "store"), folders, answers), nprocs=2, start_method=SERVER.get_start_method()
    )
    results, ended = [], 0
    while ended < 2:
        one = answers.get()
        ended += one is None
        results += [one] if one is not None else []
    return results


def split_files(folder):
    """Divide the weights of a folder into two files with an index."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    places = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize("name", [*ARCHITECTURES, "tied", "several files"])
def test_ranks_that_read_their_own_shards_have_the_whole_model_together(found, name):
    of_model = [different for one, different in found if one == name]
    assert of_model
    for different in of_model:
        assert different == (None if name in REARRANGED else [])
