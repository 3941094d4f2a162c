"""Gymformer's API, with the same submodules, so that one `sed` command ports a script.

sed 's/from gymformer/from ludus.trainer.compat.gymformer/'
"""
