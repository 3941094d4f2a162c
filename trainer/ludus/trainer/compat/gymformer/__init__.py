"""Gymformer's calls: its submodules under their names, so that one `sed` moves a script here.

sed 's/from gymformer/from ludus.trainer.compat.gymformer/'
"""
