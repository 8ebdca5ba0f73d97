"""TRL's SFTTrainer on a tiny Llama and sequences that are tokens already."""

import os

import digest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = ["<pad>", "<eos>", "<unk>"] + [f"w{number}" for number in range(61)]


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def tiny() -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=len(WORDS), num_attention_heads=4, **sizes, **special)
    )


def saved() -> str:
    """The folder of a saved model: TRL loads the reference from where the policy came from."""
    folder = f"model-{os.environ['RANK']}"
    tiny().save_pretrained(folder)
    return folder


def said(history: list[dict[str, float]]) -> None:
    """Write the log of a Trainer, without its times."""
    for entry in history:
        kept = [name for name in entry if not name.endswith(("time", "second"))]
        digest.say("log", {name: entry[name] for name in kept})


def main() -> None:
    digest.watch()
    torch.manual_seed(10)
    lengths = torch.randint(4, 12, (160,)).tolist()
    rows = [{"input_ids": torch.randint(3, 64, (length,)).tolist()} for length in lengths]
    arguments = SFTConfig(
        "out",
        use_cpu=True,
        bf16=False,
        max_steps=10,
        max_length=16,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        learning_rate=1e-2,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    train, held_out = Dataset.from_list(rows[:123]), Dataset.from_list(rows[123:])
    trainer = SFTTrainer(tiny(), arguments, None, train, held_out, tokenizer())
    trainer.train()
    said(trainer.state.log_history)


if __name__ == "__main__":
    main()
