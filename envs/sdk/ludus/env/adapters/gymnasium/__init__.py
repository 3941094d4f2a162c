"""Gymnasium environments as Ludus environments: spaces as types, numbers and pictures as text."""
