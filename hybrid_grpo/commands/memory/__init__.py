"""What a run whose memory falls short could change, for those who plan or start it."""
