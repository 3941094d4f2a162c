"""Conversion between the types of the SDK and their protobuf messages or OpenEnv JSON."""
