"""LoRA adapters: several per engine over one base model, batched in one step."""
