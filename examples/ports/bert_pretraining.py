"""Pre-train a small BERT with PopTorch: masked words and next sentences of an invented language.

    gpusim run examples/ports/bert_pretraining.py
    gpusim run examples/ports/bert_pretraining.py --optimizer LAMB --replicas 4 --checkpoint b.pt

The encoder is pipelined over the IPUs after the first. The first holds the embedding of the words
at both ends of the pipeline, since the scores of the words use it too. Weights, activations and
gradients are float16, with loss scaling and stochastic rounding; moments are float32. A run that
is interrupted goes on from its checkpoint with --resume.
"""

import argparse
from pathlib import Path

import poptorch
import torch
from torch import nn

PAD, CLS, SEP, MASK, FIRST_WORD, WORDS = 0, 1, 2, 3, 4, 16
VOCABULARY = FIRST_WORD + WORDS
SENTENCE = 7
LENGTH = 2 * SENTENCE + 3
MASKED = 2  # words of a pair that are to be predicted, at most
NOT_MASKED = -100


class Pairs(torch.utils.data.Dataset):
    """Pairs of sentences. The words of a topic follow each other in a circle; a next sentence has
    the topic of the one before it. Sample i is the same in each run, whatever is drawn before."""

    def __init__(self, first, count):
        self.first, self.count = first, count
        order = torch.randperm(WORDS, generator=torch.Generator().manual_seed(1))
        self.topics = (FIRST_WORD + order).reshape(2, WORDS // 2)

    def __len__(self):
        return self.count

    def sentence(self, topic, draw):
        start = int(torch.randint(WORDS // 2, (1,), generator=draw))
        return self.topics[topic].roll(-start)[:SENTENCE]

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(1000 + self.first + index)
        topic, other = torch.randint(2, (2,), generator=draw).tolist()
        words = torch.full((LENGTH,), SEP)
        words[0] = CLS
        words[1 : 1 + SENTENCE] = self.sentence(topic, draw)
        words[2 + SENTENCE : -1] = self.sentence(topic ^ other, draw)
        segments = (torch.arange(LENGTH) > SENTENCE + 1).long()

        inside = torch.cat([torch.arange(SENTENCE) + 1, torch.arange(SENTENCE) + 2 + SENTENCE])
        positions = inside[torch.randperm(len(inside), generator=draw)[:MASKED]]
        labels = words[positions]
        chance = torch.rand(MASKED, generator=draw)
        drawn = torch.randint(FIRST_WORD, VOCABULARY, (MASKED,), generator=draw)
        words[positions] = torch.where(chance < 0.8, MASK, torch.where(chance < 0.9, drawn, labels))
        return words, segments, positions, labels, torch.tensor(other)


class Embeddings(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width, padding_idx=PAD)
        self.positions = nn.Embedding(LENGTH, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("index", torch.arange(LENGTH), persistent=False)

    def forward(self, words, segments):
        x = self.words(words) + self.positions(self.index) + self.segments(segments)
        return self.dropout(self.norm(x))


class Layer(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, bias):
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        scores = query @ key.transpose(-1, -2) / (width // self.heads) ** 0.5 + bias
        mixed = torch.softmax(scores, -1) @ value
        mixed = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        x = self.attention_norm(x + self.dropout(mixed))
        return self.norm(x + self.dropout(self.down(nn.functional.gelu(self.up(x)))))


class Heads(nn.Module):
    """The scores of masked words, by the embedding of the words, and of next sentences."""

    def __init__(self, embedding, width):
        super().__init__()
        self.transform, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.decoder = nn.Linear(width, VOCABULARY)
        self.decoder.weight = embedding.weight
        self.pooler, self.next = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x, positions):
        masked = torch.gather(x, 1, positions.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        hidden = self.norm(nn.functional.gelu(self.transform(masked)))
        scores = poptorch.serializedMatMul(
            hidden,
            self.decoder.weight.t(),
            poptorch.MatMulSerializationMode.OutputChannels,
            factor=4,
            keep_precision=True,
        )
        return scores + self.decoder.bias, self.next(torch.tanh(self.pooler(x[:, 0])))


class Bert(nn.Module):
    def __init__(self, width, layers, heads, dropout):
        super().__init__()
        self.embeddings = Embeddings(width, dropout)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.heads = Heads(self.embeddings.words, width)
        self.apply(self.initialise)

    @staticmethod
    def initialise(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.trunc_normal_(module.weight, std=0.02 * 4, a=-1, b=1)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def parallelize(self, ipus):
        """Place the model for a pipeline: both ends on IPU 0, the layers on the others."""
        self.embeddings = poptorch.BeginBlock(self.embeddings, "embeddings", ipu_id=0)
        per_ipu = -(-len(self.layers) // (ipus - 1))
        for number, layer in enumerate(self.layers):
            if number % per_ipu == 0:
                where = 1 + number // per_ipu
                self.layers[number] = poptorch.BeginBlock(layer, f"from {number}", ipu_id=where)
        self.heads = poptorch.BeginBlock(self.heads, "heads", ipu_id=0)
        return self

    def forward(self, words, segments, positions, labels=None, is_next=None):
        x = self.embeddings(words, segments)
        bias = (words == PAD).to(x.dtype)[:, None, None, :] * -1e4
        for layer in self.layers:
            x = poptorch.recomputationCheckpoint(layer(x, bias))
        scores, next_scores = self.heads(x, positions)
        if labels is None:
            return scores.argmax(-1), next_scores.argmax(-1)
        word_loss = nn.functional.cross_entropy(
            scores.flatten(0, 1).float(), labels.flatten(), ignore_index=NOT_MASKED
        )
        next_loss = nn.functional.cross_entropy(next_scores.float(), is_next)
        return poptorch.identity_loss(word_loss + next_loss, "none"), word_loss, next_loss


def training_options(args):
    options = poptorch.Options()
    options.replicationFactor(args.replicas)
    options.deviceIterations(args.device_iterations)
    options.outputMode(poptorch.OutputMode.Sum)
    options.randomSeed(args.seed)
    options.autoRoundNumIPUs(True)
    options.Training.gradientAccumulation(args.accumulation)
    options.Precision.enableStochasticRounding(True)
    options.Precision.setPartialsType(torch.half)
    options.TensorLocations.setOptimizerLocation(
        poptorch.TensorLocationSettings().useOnChipStorage(False).useReplicatedTensorSharding(True)
    )
    if args.ipus > 1:
        options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
    return options


def optimizer_of(model, args):
    """Weight decay is for matrices: not for biases and norms."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    kind = {"AdamW": poptorch.optim.AdamW, "LAMB": poptorch.optim.LAMB}[args.optimizer]
    return kind(
        groups,
        lr=args.lr,
        betas=(0.9, 0.98),
        eps=1e-6,
        loss_scaling=args.loss_scaling,
        accum_type=torch.float16,
        first_order_momentum_accum_type=torch.float32,
        second_order_momentum_accum_type=torch.float32,
    )


def warmup_and_decay(optimizer, args):
    warmup = max(1, int(0.1 * args.steps))

    def factor(step):
        return min((step + 1) / warmup, max(0.0, (args.steps - step) / (args.steps - warmup)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def evaluate(model, args):
    """The shares of masked words and of next sentences that are predicted, of pairs not seen."""
    options = poptorch.Options().deviceIterations(8).autoRoundNumIPUs(True)
    if args.ipus > 1:
        options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
    loader = poptorch.DataLoader(options, Pairs(10**6, args.held_out), batch_size=16)
    inference = poptorch.inferenceModel(model.eval(), options)
    words, nexts = [], []
    for *inputs, labels, is_next in loader:
        found, found_next = inference(*inputs)
        words.append(found == labels)
        nexts.append(found_next == is_next)
    inference.destroy()
    return torch.cat(words).float().mean().item(), torch.cat(nexts).float().mean().item()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--ipus", type=int, default=3, help="of a replica; 1: no pipeline")
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--device-iterations", type=int, default=1)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--optimizer", choices=["AdamW", "LAMB"], default="AdamW")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--loss-scaling", type=float, default=128.0)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--held-out", type=int, default=512, help="pairs; 0: only train")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--checkpoint", type=Path, help="written at the end, and every 100 steps")
    parser.add_argument("--stop-after", type=int, help="end here, as if the time were up")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    args = parser.parse_args(arguments)

    torch.manual_seed(args.seed)
    model = Bert(args.width, args.layers, 4, args.dropout).half().train()
    if args.ipus > 1:
        model.parallelize(args.ipus)
    optimizer = optimizer_of(model, args)
    schedule = warmup_and_decay(optimizer, args)
    options = training_options(args)

    step, rng_state = 0, None
    if args.resume:
        saved = torch.load(args.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        step, rng_state = saved["step"], saved["rng_state"]

    batch = args.micro_batch * args.replicas * args.accumulation
    done = step * batch
    loader = poptorch.DataLoader(
        options,
        Pairs(done, args.steps * batch - done),
        batch_size=args.micro_batch,
        mode=poptorch.DataLoaderMode.Async,
    )
    training = poptorch.trainingModel(model, options, optimizer)

    def save():
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "step": step,
            "rng_state": training.rng_state,
        }
        torch.save(state, args.checkpoint)

    micro_batches = args.accumulation * args.replicas * args.device_iterations
    for inputs in loader:
        if rng_state is not None:
            training.compile(*inputs)
            training.rng_state, rng_state = rng_state, None
        losses = [float(loss.float().sum()) / micro_batches for loss in training(*inputs)]
        for _ in range(args.device_iterations):
            schedule.step()
        training.setOptimizer(optimizer)
        step += args.device_iterations
        if step % 50 == 0 or step == args.steps:
            print("step {}: loss {:.3f} (words {:.3f}, next {:.3f})".format(step, *losses))
        if args.checkpoint and (step % 100 == 0 or step in (args.steps, args.stop_after)):
            save()
        if step == args.stop_after:
            break
    training.destroy()
    loader.terminate()
    if args.held_out:
        words, nexts = evaluate(model, args)
        print(f"after {step} steps: {words:.1%} of masked words, {nexts:.1%} of next sentences")


if __name__ == "__main__":
    main()
