"""Training on given data: supervised fine-tuning (`sft`) and preference optimization (`dpo`)."""
