"""Weights on their way from the learner to the rollout workers.

store      versions: publishing, fetching, retention, time limits
payload    one version as bytes, complete or as a difference, with checksums
folder, bucket (and actors/weight_store.py)  storage of the bytes
canary     proof that a worker samples from the weights that it loaded
adapters   merging of adapters and base weights into the tensors that an engine loads
"""
