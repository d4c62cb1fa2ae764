"""Training on rows that are read during the run, from sources too large to download or to hold in memory."""
