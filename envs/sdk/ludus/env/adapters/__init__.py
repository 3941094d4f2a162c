"""Other people's environments as ours: Gymnasium's and OpenEnv's."""

GYMNASIUM = "gymnasium"
OPENENV = "openenv"
