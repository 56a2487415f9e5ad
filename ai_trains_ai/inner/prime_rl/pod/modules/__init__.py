"""Modules that the engine imports on the pod, by the names ``ata_job`` and ``ata_harness`` of its config.

They are shipped as files and import nothing of ours: the stub of the taskset for the engine's own processes, the shim
around the agent's taskset for the env server, and the harness for both.
"""
