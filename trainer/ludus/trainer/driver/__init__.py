"""The process that trains a language model: the run as an object, and its loops."""
