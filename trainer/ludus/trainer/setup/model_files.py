"""The files of a model's folder, which are checked before a run starts. No weights are read."""

from __future__ import annotations

from ludus.proto.errors import NotFoundError
from ludus.trainer.core.model_paths import check_model_folder, is_folder_path
from ludus.trainer.models.weight_files import find_weight_problem


def find_model(path: str, field: str, hint: str = "") -> str:
    """Return the expanded path of a folder with a model, or a Hugging Face id unchanged.

    Args:
        field: name of the configuration field, for messages.
        hint: end of the message if there is no model.

    Raises:
        UserError: the path is that of a file, or the folder is not complete.
    """
    folder = check_model_folder(path, field, hint)
    if folder is None:
        return path
    weight_problem = find_weight_problem(folder)
    if weight_problem is not None:
        raise NotFoundError(
            f"{field} = '{path}': {weight_problem}; copy the whole folder that "
            "save_pretrained wrote"
        )
    return str(folder) if is_folder_path(path) else path
