"""Where machines come from. Each provider knows nothing of jobs."""
