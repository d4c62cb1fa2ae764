"""What `chat` shows and keeps: text as it is sampled, and the conversation so far."""
