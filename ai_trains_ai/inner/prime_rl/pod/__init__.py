"""What runs on the pod. Shipped with every job; standard library alone, and nothing of ours but its siblings.

The supervisor starts prime-rl's processes in order, watches them, and leaves a verdict and the trained weights. No code
of an agent runs in any process but the env server, which is behind a wall (`confine`).
"""
