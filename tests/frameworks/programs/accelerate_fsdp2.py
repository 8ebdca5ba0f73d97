"""Accelerate's FSDP2 (fully_shard): accumulation, clipping, evaluation, a restored state."""

import argparse

import digest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

TINY = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
)


def loader(length: int, **options: bool) -> DataLoader:
    return DataLoader(TensorDataset(torch.randint(64, (length, 9))), batch_size=4, **options)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bf16", action="store_true")
    precision = "bf16" if parser.parse_args().bf16 else "no"
    digest.watch()
    set_seed(4)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    # Accelerate takes the plugin for processes with a GPU only: on CPUs it would use DDP.
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    accelerator = Accelerator(
        gradient_accumulation_steps=2, mixed_precision=precision, fsdp_plugin=plugin
    )
    model = LlamaForCausalLM(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    train, held_out = accelerator.prepare(loader(131, shuffle=True), loader(37))

    def epoch() -> None:
        for (ids,) in train:
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=ids, labels=ids).loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    digest.say("norm", norm.full_tensor())
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            sums = (model(input_ids=ids).logits.float().sum((1, 2)) for (ids,) in held_out)
            digest.say("sums", torch.cat([accelerator.gather_for_metrics(each) for each in sums]))

    epoch()
    accelerator.save_state("state")
    epoch()
    accelerator.load_state("state")
    epoch()
    accelerator.end_training()


if __name__ == "__main__":
    main()
