"""The only room that imports verifiers: loads an agent's environment, scores replies and runs episodes in process.

Its modules import verifiers, so import them where agent code may run: inside a sandboxed child. `versions` is light.
"""
