"""Several ranks each read their own rows of the weights, end with the model that one rank loads, and store it as it was."""

import json
import tempfile
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from adapters import trained_adapter
from hybrids import hybrid_settings
from killing import SERVER
from models import ARCHITECTURES, model_folder
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from tandem.config.sections.policy import Policy as PolicyConfig
from tandem.exporting.gathering import gather_to_disk
from tandem.exporting.weights import _empty_model
from tandem.model.distributed.layers import shard
from tandem.model.distributed.mesh import MeshShape
from tandem.model.distributed.process_group import make_ranks
from tandem.model.distributed.sharded_load import _Files
from tandem.model.files.source import find_model
from tandem.model.load import as_policy, load_policy, unloaded_model
from tandem.model.lora.adapters import adapt_unloaded, load_adapted, merge_adapters, read_weights
from tandem.model.lora.layers import adapted_weights, lora_layers, plan_lora

CPU = torch.device("cpu")
# Models whose files hold one tensor per expert, which transformers stacks.
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16}
EXPERTS = {
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "deepseek_v3": {**LATENT, **GROUPS, "num_experts_per_tok": 2, "num_key_value_heads": 4, "head_dim": 4},
}
# A model with weights that are several stored ones, one below the other.
JOINED = {"olmo_hybrid": hybrid_settings("olmo_hybrid")}
BOTH_DTYPES = ("llama", "tied", "gpt_oss", "qwen3_moe", *EXPERTS)
LORA = {"enabled": True, "dim": 4, "target_modules": ["q_proj", "down_proj"]}
PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]
ADAPTED = {
    "new adapters": ("llama", LORA),
    "adapters of experts": ("qwen3_moe", {**LORA, "target_modules": ["q_proj"], "target_parameters": PARAMETERS}),
    "new DoRA adapters": ("llama", {**LORA, "use_dora": True}),
    "a trained adapter": ("llama", {"enabled": True, "adapter": "adapter"}),
    "a trained DoRA adapter": ("llama", {"enabled": True, "adapter": "dora"}),
    "adapters and experts": ("mixtral", {**LORA, "target_modules": ["q_proj", "v_proj"]}),
}


def whole(model):
    """The tensors of a model by name. Sharded ones are put together."""
    found = dict([*model.named_parameters(), *model.named_buffers()])
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in found.items()}


def different(found, expected):
    assert found.keys() == expected.keys()
    return [
        name
        for name, tensor in expected.items()
        if tensor.dtype != found[name].dtype
        or tensor.requires_grad != found[name].requires_grad
        or not torch.equal(tensor, found[name])
    ]


def loaded_both_ways(folder, dtype, shape, settings=None):
    """The names of tensors that differ between a model read shard by shard and one that is loaded whole."""
    config = PolicyConfig.model_validate({"model_name": str(folder), "lora": settings or {}})
    source = find_model(config)
    plan = plan_lora(source, config.lora, CPU, "bfloat16") if settings else None
    dtype = plan.dtype if plan else dtype
    published = source.config.dtype
    torch.manual_seed(3)
    expected = whole(load_adapted(source, config, CPU, plan) if plan else load_policy(source, config, CPU, dtype=dtype))
    drawn = torch.get_rng_state()
    torch.manual_seed(3)
    unloaded = unloaded_model(source, config, dtype)
    assert source.config.dtype == published
    if unloaded is None:
        return None
    if plan:
        adapt_unloaded(unloaded.model, plan, source)
        assert torch.equal(torch.get_rng_state(), drawn)
    policy = as_policy(unloaded.model, source, config, CPU)
    assert all(one.is_meta for name, one in policy.named_parameters() if "lora_" not in name)
    mixed = dtype == torch.bfloat16  # computes in bfloat16 if frozen weights and adapters have different dtypes
    with counted_numbers() as counted:
        shard(policy, make_ranks(CPU, shape), bfloat16=mixed, read=lambda: read_weights(source, unloaded, CPU, plan))
    if shape.shard == 2 and source.config.model_type not in JOINED:
        assert sum(counted) == num_own_numbers(policy)
    assert isinstance(policy.model.get_input_embeddings().weight, DTensor)
    names = different(whole(policy), expected)
    if dtype == torch.float32 or plan:
        names += different_on_disk(policy, source, dtype, expected)
    return names


def different_on_disk(policy, source, dtype, expected):
    """The names of tensors that, gathered on disk, differ from those in the files, with adapters merged into them."""
    published = load_file(source.folder / "model.safetensors") if is_single_file(source.folder) else None
    ranks = make_ranks(CPU, MeshShape(shard=2))
    empty = _empty_model(policy, source.config, dtype)
    with tempfile.TemporaryDirectory() as folder:
        gathered = gather_to_disk(policy, empty, Path(folder) / "gathered", lambda _, tensor: tensor, ranks)
        dist.barrier()
    if not ranks.is_first or published is None:
        return []
    tensors = {name.removeprefix("model."): tensor for name, tensor in expected.items()}
    merged = merge_adapters(policy.model, tensors) if lora_layers(policy.model) else {}
    adapted = {name: merged[name] for name in adapted_weights(policy.model)}
    kept = published.keys() - ({"lm_head.weight"} if source.config.tie_word_embeddings else set())
    assert gathered.keys() == kept
    return [name for name in kept if not torch.equal(gathered[name], adapted.get(name, published[name].to(dtype)))]


def is_single_file(folder):
    return (folder / "model.safetensors").is_file()


@contextmanager
def counted_numbers():
    """How many numbers each read from the files returns."""
    counted, read = [], _Files.read
    with patch.object(_Files, "read", lambda *given: counted.append((part := read(*given)).numel()) or part):
        yield counted


def num_own_numbers(policy):
    """How many numbers of the frozen or trained model this rank holds, without adapters."""
    saved = policy.state_dict().keys()
    tensors = [*policy.named_parameters(), *policy.named_buffers()]
    own = [
        one.to_local() if isinstance(one, DTensor) else one
        for name, one in tensors
        if name in saved and "lora_" not in name
    ]
    return sum(one.numel() for one in own)


def _rank(number, path, folders, answers):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=number, world_size=2)
    for name, folder in folders.items():
        dtypes = [torch.float32, torch.bfloat16] if name in BOTH_DTYPES else [torch.float32]
        shapes = [MeshShape(shard=2), MeshShape(replicate=2)] if name == "llama" else [MeshShape(shard=2)]
        for dtype, shape in product(dtypes, shapes):
            answers.put((name, loaded_both_ways(folder, dtype, shape)))
    for name, (model, settings) in ADAPTED.items():
        given = settings | (
            {"adapter": str(folders["llama"].parent / settings["adapter"])} if "adapter" in settings else {}
        )
        answers.put((name, loaded_both_ways(folders[model], None, MeshShape(shard=2), given)))
    answers.put(None)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    folders = {name: model_folder(folder / name, name) for name in ARCHITECTURES}
    folders |= {name: model_folder(folder / name, name, **more) for name, more in {**EXPERTS, **JOINED}.items()}
    folders["tied"] = model_folder(folder / "tied", "llama", tie_word_embeddings=True)
    folders["tied, both stored"] = model_folder(folder / "both", "llama", tie_word_embeddings=True)
    store_head(folders["tied, both stored"], factor=1)
    folders["tied, but different"] = model_folder(folder / "different", "llama", tie_word_embeddings=True)
    store_head(folders["tied, but different"], factor=2)
    folders["several files"] = model_folder(folder / "several", "llama")
    split_files(folders["several files"])
    trained_adapter(folders["llama"], folder / "adapter")
    trained_adapter(folders["llama"], folder / "dora", use_dora=True)
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


def store_head(folder, *, factor):
    """Store the head of a model with tied weights as a separate tensor: the embeddings times a factor."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


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


@pytest.mark.parametrize(
    "name", [*ARCHITECTURES, *EXPERTS, *JOINED, *ADAPTED, "tied", "tied, both stored", "several files"]
)
def test_ranks_that_read_their_own_shards_have_the_whole_model_together_and_store_it_as_it_was(found, name):
    of_model = [names for one, names in found if one == name]
    assert of_model
    assert all(names == [] for names in of_model)


def test_a_model_whose_tied_weights_are_stored_twice_and_differ_is_loaded_whole(found):
    """transformers does not tie them."""
    assert [names for one, names in found if one == "tied, but different"] == [None, None]
