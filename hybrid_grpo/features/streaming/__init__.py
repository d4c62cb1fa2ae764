"""Training on rows that are read as the run goes, of sources too large to download or to hold in memory."""
