"""torchtitan's debug Llama by its Trainer: FSDP2 over the ranks that --tp and --pp leave."""

import argparse
import dataclasses
import json
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import digest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import _utils, nn
from torch.distributed.fsdp import FSDPModule

HOST = not torch.cuda.is_available()
if HOST:
    # torchtitan takes the accelerator, or else CUDA, as it is imported: no setting names the host.
    _utils._get_available_device_type = lambda: "cpu"

from torchtitan.components import metrics  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed import utils  # noqa: E402
from torchtitan.hf_datasets import DatasetConfig, text_datasets  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.protocols import train_spec  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

WORDS = 500  # fewer than the model's vocabulary of 2048

if HOST:
    # `torch.cpu` has no memory to tell of, and gloo's barrier takes no devices as NCCL's does.
    metrics.build_device_memory_monitor = lambda: SimpleNamespace(
        device_name="host",
        get_peak_stats=lambda: metrics.DeviceMemStats(0, 0, 0, 0, 0, 0),
        reset_peak_stats=lambda: None,
    )
    utils.set_pg_timeouts = lambda timeout, parallel_dims: None


class Metrics(metrics.MetricsProcessor):
    """torchtitan's metrics, of which a rank writes down those that depend on no clock."""

    def log(self, step: int, *values: float, extra_metrics: dict[str, Any]) -> None:
        digest.say(f"step {step}", [*values, extra_metrics])
        super().log(step, *values, extra_metrics=extra_metrics)


def parallelize(model: nn.Module, *arguments: Any) -> nn.Module:
    """Have FSDP2 add for itself: torchtitan's factor of 1 is NCCL's PREMUL_SUM, not gloo's."""
    parallel = llama3.parallelize_llama(model, *arguments)
    for module in (each for each in parallel.modules() if HOST and isinstance(each, FSDPModule)):
        module.set_force_sum_reduction_for_comms(True)
    return parallel


def texts(_: str) -> datasets.Dataset:
    draw = random.Random(0)
    lines = [" ".join(f"w{draw.randrange(WORDS)}" for _ in range(40)) for _ in range(200)]
    return datasets.Dataset.from_dict({"text": lines})


def write_tokenizer(folder: str) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    words = [*(f"w{word}" for word in range(WORDS)), *special.values()]
    tokenizer = Tokenizer(models.WordLevel({word: each for each, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(f"{folder}/tokenizer.json")
    Path(folder, "tokenizer_config.json").write_text(json.dumps(special))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--schedule", default="1F1B", help="the pipeline's, or Interleaved1F1B")
    options = parser.parse_args()
    digest.watch()
    text_datasets.DATASETS["words"] = DatasetConfig("", texts, lambda row: row["text"])
    spec = dataclasses.replace(train_spec.get_train_spec("llama3"), parallelize_fn=parallelize)
    spec.build_metrics_processor_fn = lambda job, dims, _: Metrics(job, dims)
    train_spec.register_train_spec("llama3", spec)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(folder)
        settings = (
            f"--model.flavor debugmodel --model.hf_assets_path {folder} --training.dataset words "
            "--training.local_batch_size 4 --training.seq_len 32 --training.steps 10 "
            f"--lr_scheduler.warmup_steps 2 --metrics.log_freq 1 --job.dump_folder {folder} "
            f"--debug.seed 1 --parallelism.tensor_parallel_degree {options.tp} "
            f"--parallelism.pipeline_parallel_degree {options.pp} "
            f"--parallelism.pipeline_parallel_schedule {options.schedule}"
        )
        trainer = Trainer(ConfigManager().parse_args(settings.split()))
        trainer.train()
        trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
