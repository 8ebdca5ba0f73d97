"""TRL's DPOTrainer on a tiny Llama: a policy and its reference."""

import digest
import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer
from trl_sft import WORDS, said, saved, tokenizer


def text(words: int) -> str:
    return " ".join(WORDS[at] for at in torch.randint(3, len(WORDS), (words,)).tolist())


def main() -> None:
    digest.watch()
    torch.manual_seed(11)
    rows = [
        {"prompt": text(4), "chosen": " " + text(2 + at % 3), "rejected": " " + text(2 + at % 2)}
        for at in range(140)
    ]
    arguments = DPOConfig(
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
    trainer = DPOTrainer(
        saved(),
        args=arguments,
        train_dataset=Dataset.from_list(rows[:117]),
        eval_dataset=Dataset.from_list(rows[117:]),
        processing_class=tokenizer(),
    )
    trainer.train()
    said(trainer.state.log_history)


if __name__ == "__main__":
    main()
