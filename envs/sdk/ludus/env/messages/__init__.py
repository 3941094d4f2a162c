"""Between the types of the environment plane and what travels: protobuf and OpenEnv JSON."""
