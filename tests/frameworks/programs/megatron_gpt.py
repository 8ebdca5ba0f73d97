"""Megatron-Core's GPT in parallel: the losses are those of one rank, whatever the layout."""

import argparse
import re
import zlib
from collections.abc import Iterator
from typing import Any

import digest
import torch
import torch.distributed as dist
from megatron.core import distributed
from megatron.core import parallel_state as state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

LAYERS, VOCABULARY, LENGTH, EXPERTS = 4, 64, 16, 4
MODEL = {"num_layers": LAYERS, "hidden_size": 32, "num_attention_heads": 4}
PLAIN = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "pipeline_dtype": torch.float32}
SAMPLES, MICROBATCHES = 8, 4  # in the global batch; at most, on one rank
NUMBERED = re.compile(r"\b(layers|local_experts)\.(\d+)")
moe_utils.te_general_gemm = None  # which 0.16.1 leaves undefined without Transformer Engine


class Norm(torch.nn.LayerNorm):  # for Apex's; Megatron's own fallback refuses sequence parallelism
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def initialise(chunk: GPTModel, first: dict[str, int]) -> None:
    """Cut this rank's shards from weights that depend on their names in the whole model only."""
    ranks = state.get_tensor_model_parallel_group()
    for name, parameter in chunk.named_parameters():
        name = NUMBERED.sub(lambda at: f"{at[1]}.{int(at[2]) + first[at[1]]}", name)
        split = getattr(parameter, "tensor_model_parallel", False)
        parts, axis = (ranks.size(), parameter.partition_dim) if split else (1, 0)
        shape = list(parameter.shape)
        shape[axis] *= parts
        draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(shape, generator=draw) * 0.1 + name.endswith("layernorm.weight")
        parameter.data.copy_(whole.chunk(parts, axis)[ranks.rank() % parts])


def chunks_of(args: argparse.Namespace, sizes: dict[str, Any]) -> list[torch.nn.Module]:
    config = TransformerConfig(
        num_moe_experts=EXPERTS if args.ep else None,
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=not args.ep,
        sequence_parallel=args.sp,
        overlap_p2p_comm=args.vpp > 1,
        batch_p2p_comm=args.vpp == 1,
        finalize_model_grads_func=distributed.finalize_model_grads,
        **(MODEL | PLAIN | sizes),
    )
    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    layers = LAYERS // (args.pp * args.vpp)
    spec = TransformerBlockSubmodules([layer] * layers, Norm)
    replicas = distributed.DistributedDataParallelConfig(use_distributed_optimizer=args.zero)
    expert = EXPERTS // max(args.ep, 1) * state.get_expert_model_parallel_rank()
    chunks = []
    for number in range(args.vpp):
        stage = number * args.pp + state.get_pipeline_model_parallel_rank()
        ends = stage == 0, stage == args.pp * args.vpp - 1
        chunk = GPTModel(config, spec, VOCABULARY, LENGTH, *ends, vp_stage=number)
        initialise(chunk, {"layers": stage * layers, "local_experts": expert})
        chunks.append(distributed.DistributedDataParallel(config, replicas, chunk.cuda()))
    return chunks


def forward(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(batches)
    places = torch.arange(LENGTH, device=tokens.device).expand(len(tokens), LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).triu(1)
    output = model(tokens[:, :-1].contiguous(), places, mask, labels=tokens[:, 1:].contiguous())
    return output, lambda losses: (losses.mean(), losses.detach().mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in ("tp", 1), ("pp", 1), ("vpp", 1), ("ep", 0), ("steps", 10):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sp", action="store_true")
    parser.add_argument("--zero", action="store_true")
    args = parser.parse_args()  # an ep of 1 or more makes it a mixture of experts
    digest.watch()
    torch.compiler.set_stance("force_eager")
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    counts = args.tp, args.pp, args.vpp if args.vpp > 1 else None, max(args.ep, 1)
    kinds = "tensor_model", "pipeline_model", "virtual_pipeline_model", "expert_model"
    sizes = {f"{kind}_parallel_size": each for kind, each in zip(kinds, counts, strict=True)}
    state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(0)
    chunks = chunks_of(args, sizes)
    settings = OptimizerConfig(optimizer="adam", lr=5e-3, use_distributed_optimizer=args.zero)
    optimizer = get_megatron_optimizer(settings, chunks)
    data, pipeline = state.get_data_parallel_group(), state.get_pipeline_model_parallel_group()
    share = max(1, SAMPLES // data.size())
    count = min(MICROBATCHES, share)
    run: Any = get_forward_backward_func()
    how = {"num_microbatches": count, "seq_length": LENGTH, "micro_batch_size": share // count}
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(VOCABULARY, (args.steps, share * data.size(), 1), generator=generator)
    texts = (starts.cuda() + 7 * torch.arange(LENGTH + 1, device="cuda")) % VOCABULARY
    losses = torch.zeros(args.steps, device="cuda")
    for step, batch in enumerate(texts.chunk(data.size(), 1)[data.rank()]):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        batches = [iter(batch.chunk(count)) for _ in chunks]
        found = run(forward_step_func=forward, data_iterator=batches, model=chunks, **how)
        optimizer.step()
        losses[step] = sum(found) / (count * data.size())  # there are none before the last stage
    dist.all_reduce(losses, group=data)
    dist.broadcast(losses, group=pipeline, group_src=args.pp - 1)
    digest.say("losses", losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
