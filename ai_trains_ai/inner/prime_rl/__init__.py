"""prime-rl as the inner trainer: its versions, what an agent may set, and what fits on which machine."""
