"""`tandem plan`: the memory, time, cost and disk space of a run, estimated before any weights load."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tandem.config.load import LoadedConfig
from tandem.data.store.sets import ProgressBar, no_bar
from tandem.errors import ConfigError
from tandem.exporting.cached import export_named_checkpoints
from tandem.model.architecture import is_multimodal
from tandem.model.distributed.layer_sizes import layers_of
from tandem.model.distributed.layers import check_layers
from tandem.model.load import empty_model
from tandem.model.lora.layers import LoraPlan
from tandem.planning.cards import check_price
from tandem.planning.estimate import Outline, Target, find_target, outline, speed_of_one_gpu
from tandem.planning.gpus import NO_OPTIONS, GpuOptions, planned_mesh
from tandem.planning.records import DiskNeed, RunEstimate, Suggestion
from tandem.planning.speed import ModelSize, size_of
from tandem.planning.suggestions import Planner, suggest
from tandem.storage.cache import free_bytes
from tandem.training.start.setup import Inputs, check_model, open_inputs


def plan(
    loaded: LoadedConfig,
    *,
    gpu: str | None = None,
    options: GpuOptions = NO_OPTIONS,
    price_per_hour: float | None = None,
    bar: ProgressBar = no_bar,
) -> RunEstimate:
    """Estimate what a run needs, without loading or downloading weights. Data is tokenised and kept in the cache.

    `gpu`: the name of a card (`planning/cards.py`); None: this machine. `options`: how many, and how they are connected.
    `price_per_hour`: of a GPU, in any currency. `bar`: opens a progress bar.
    Raises the same errors as training, except that a run may exceed the memory.
    """
    check_price(price_per_hour)
    options.check()
    target = _with_all_gpus(find_target(gpu), loaded, options)
    if price_per_hour is not None and target.device.type != "cuda":
        raise ConfigError(
            f"--price-per-hour {price_per_hour:g} has no effect without a GPU: the time of a run on a CPU is not estimated. Add "
            "--gpu NAME, or leave it out."
        )
    config = loaded.config
    planned_mesh(config, target.gpus)
    export_named_checkpoints(config, say=lambda text: None)
    source = check_model(config, needs_weights=False)
    inputs = open_inputs(config, source, bar, needs_weights=False)
    if target.gpus.total > 1:
        check_layers(source, config.policy, target.gpus.total)
    model = empty_model(source)
    size, layers = size_of(model), layers_of(model)
    found = outline(inputs, target, size, layers)
    suggestions: tuple[Suggestion, ...] = ()
    if found.memory.verdict != "fits":
        suggestions = suggest(Planner(loaded, inputs, size, layers, price_per_hour), target, bar)
    lora, several = found.machine.lora, found.several
    if several is not None and found.time is not None:
        several = replace(several, one_gpu_speed=speed_of_one_gpu(inputs, target, size, layers))
    return RunEstimate(
        model=config.policy.model_name,
        num_weights=size.num_weights,
        num_trained=size.num_weights if lora is None else lora.num_trained,
        card=target.card,
        num_steps=found.plan.num_steps,
        num_pairs=found.plan.num_pairs,
        num_tokens=round(found.work.tokens),
        rows=found.rows,
        memory=found.memory,
        time=found.time,
        no_time=found.no_time,
        price_per_hour=price_per_hour,
        cost=None if found.time is None else found.time.cost(price_per_hour, target.gpus.total),
        disk=_disk_need(inputs, found, size, is_here=target.is_here),
        suggestions=suggestions,
        host=found.host if config.policy.optimizer.offload else None,
        several=several,
        notes=_notes(inputs.source.config, lora),
    )


def _notes(config: Any, lora: LoraPlan | None) -> tuple[str, ...]:
    part = [f"multimodal ({config.model_type}): only its text model is trained"] if is_multimodal(config) else []
    return (*part, *(f"no adapters on {one}" for one in (lora.left_out if lora else ())))


def _with_all_gpus(target: Target, loaded: LoadedConfig, options: GpuOptions) -> Target:
    """Return the target with as many GPUs as the run has. On a CPU, the ranks of a machine share its memory."""
    is_gpu = target.device.type == "cuda"
    found = None if not target.is_here else torch.cuda.device_count() if is_gpu else 0
    gpus = options.count(loaded, found)
    return replace(
        target, gpus=gpus, options=options, memory=target.memory if is_gpu else target.memory // gpus.per_machine
    )


def _disk_need(inputs: Inputs, found: Outline, size: ModelSize, *, is_here: bool) -> DiskNeed:
    """`is_here`: whether the run is planned for this machine, so that its free space is of interest."""
    config, lora, parts = inputs.config, found.machine.lora, found.need.parts
    shards = found.machine.mesh.weight_shards
    trained = lora.num_trained * 4 if lora is not None else parts.weights * shards
    checkpoint = trained + (parts.all_states * shards if config.checkpointing.save_optimizer else 0)
    num_saved = math.ceil(found.plan.num_steps / found.plan.save_period)
    # The latest one is kept next to the best ones, and one is removed only after the next one is written.
    num = min(num_saved, config.checkpointing.keep_top_k + 2) if config.checkpointing.enabled else 0
    auto = inputs.source.dtype.itemsize if lora is None or config.export.merge_lora else 4
    itemsize = {"auto": auto, "float32": 4, "bfloat16": 2, "float16": 2}[config.export.dtype]
    exported = size.num_weights if lora is None or config.export.merge_lora else lora.num_trained
    folder = Path(config.run.dir or config.checkpointing.checkpoint_dir or "runs")
    return DiskNeed(
        checkpoint=checkpoint,
        num_checkpoints=num,
        export=exported * itemsize,
        folder=str(folder),
        free=free_bytes(folder) if is_here else None,
    )
