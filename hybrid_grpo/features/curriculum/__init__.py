"""Success rates of prompts, kept over the run, and an order of prompts that can follow them."""
