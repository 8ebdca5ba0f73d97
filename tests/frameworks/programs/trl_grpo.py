"""TRL's GRPOTrainer on a tiny Llama that samples its completions; longer words are rewarded."""

import digest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl_dpo import text
from trl_sft import said, saved, tokenizer


def high(completions: list[str], **_: object) -> list[float]:
    """How much of a completion's words are w3x."""
    return [
        sum(word.startswith("w3") for word in each.split()) / (1 + len(each.split()))
        for each in completions
    ]


def main() -> None:
    digest.watch()
    torch.manual_seed(12)
    arguments = GRPOConfig(
        "out",
        use_cpu=True,
        bf16=False,
        max_steps=10,
        num_generations=2,
        max_completion_length=6,
        per_device_train_batch_size=4,
        gradient_checkpointing=False,
        beta=0.04,
        learning_rate=1e-2,
        logging_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = Dataset.from_list([{"prompt": text(4)} for _ in range(64)])
    trainer = GRPOTrainer(
        saved(), high, args=arguments, train_dataset=rows, processing_class=tokenizer()
    )
    trainer.train()
    said(trainer.state.log_history)


if __name__ == "__main__":
    main()
