"""Publishes the trained model of a run with its card, in a repository of the Hugging Face hub or in a folder."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HTTPError

from hybrid_grpo.config.errors import UserError, did_you_mean, refuse
from hybrid_grpo.distributed.ranks import rank
from hybrid_grpo.records.exports import FACTS, exported
from hybrid_grpo.records.files import replace_folder, sync_tree
from hybrid_grpo.records.lock import FolderLock
from hybrid_grpo.records.publishing.card import Evaluation, TrainedRun, write_card
from hybrid_grpo.records.publishing.curves import draw_curves
from hybrid_grpo.records.publishing.options import PublishOptionsConfig
from hybrid_grpo.records.publishing.redaction import publishable
from hybrid_grpo.records.write_failures import one_line

CONTENTS = "publication.json"
"""Name of the file that lists the files of a publication and their sizes, and by which a publication is recognized."""
_NAMING_FOLDERS = ("config.json", "generation_config.json", "tokenizer_config.json", "adapter_config.json")
"""Files of a model in which libraries may have recorded the folder from which the model was loaded."""


def publish(folder: Path, options: PublishOptionsConfig) -> str:
    """Publish a run's model on rank 0, and return the address of the repository, or the folder. Raise UserError."""
    address = str(options.folder) if options.hub is None else f"{huggingface_hub.constants.ENDPOINT}/{options.hub}"
    if rank() != 0:
        return address
    run = _trained_run(folder, options.model)
    evaluation = _evaluation(Path(options.evaluation), run) if options.evaluation else run.evaluation()
    with ExitStack() as stack:
        with one_line(folder, ""):
            # So that no run replaces the model while it is copied; none can where nobody can write.
            if not os.statvfs(folder).f_flag & os.ST_RDONLY:
                stack.callback(FolderLock(folder).release)
        if options.hub is None:
            _into_folder(run, evaluation, options, Path(str(options.folder)))
        else:
            _onto_hub(run, evaluation, options, options.hub)
    return address


def _trained_run(folder: Path, model: str) -> TrainedRun:
    for name in ("config.yaml", "metrics.jsonl"):
        refuse(not (folder / name).is_file(), f"{folder} is not the folder of a run: it has no {name}")
    models = [path.parent.name for path in sorted(folder.glob(f"model*/{FACTS}")) if exported(path.parent)]
    refuse(not models, f"{folder}: the run has no trained model yet: finish it with --run.resume auto")
    refuse(model not in models, f"publish.model {model}: the run has no such model: {did_you_mean(model, models)}")
    return TrainedRun(folder, folder / model)


def _evaluation(file: Path, run: TrainedRun) -> Evaluation:
    """Read the output of `hybrid-grpo eval` for the run's model."""
    try:
        printed = json.loads(file.read_text(encoding="utf-8").strip().splitlines()[-1])
        of_model, evaluation = Path(printed["model"]), Evaluation.printed(printed)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise UserError(
            f"publish.evaluation {file} is not what hybrid-grpo eval prints on standard output: write it again with"
            f" hybrid-grpo eval --config {run.folder}/config.yaml > {file}"
        ) from None
    refuse(
        of_model.resolve() != run.model.resolve(),
        f"publish.evaluation {file} measures {of_model}, not {run.model}: evaluate the latter with --policy.model",
    )
    return evaluation


def _fill(
    draft: Path, run: TrainedRun, evaluation: Evaluation, options: PublishOptionsConfig,
    copy: Callable[[Path, Path], Any],
) -> None:  # fmt: skip
    """Write everything that is published to the folder `draft`, which must not exist yet."""
    for source in sorted(path for path in run.model.rglob("*") if path.is_file() and path.name != FACTS):
        target = draft / source.relative_to(run.model)
        target.parent.mkdir(parents=True, exist_ok=True)
        copy(source, target)
    for path in (path for name in _NAMING_FOLDERS for path in draft.rglob(name)):
        settings = json.loads(path.read_bytes())
        if (shown := publishable(settings)) != settings:
            path.unlink()  # it may be a hard link to the run's file
            path.write_text(json.dumps(shown, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    curves = draw_curves(run.lines)
    if curves is not None:
        (draft / "curves.svg").write_text(curves, encoding="utf-8")
    (draft / "config.yaml").write_text(run.recipe, encoding="utf-8")
    name = options.hub or Path(str(options.folder)).resolve().name
    write_card(draft / "README.md", run, evaluation, name, options.license)
    (draft / CONTENTS).write_text(json.dumps({"files": _sizes(draft)}, indent=2) + "\n", encoding="utf-8")


def _sizes(folder: Path) -> dict[str, int]:
    """Return the sizes in bytes of the files of a publication, by their relative paths."""
    files = (path for path in sorted(folder.rglob("*")) if not path.is_dir())
    return {str(path.relative_to(folder)): path.lstat().st_size for path in files if path.name != CONTENTS}


def _is_publication(folder: Path) -> bool:
    """Return whether a folder holds an unchanged earlier publication and nothing else."""
    try:
        listed: Any = json.loads((folder / CONTENTS).read_bytes())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(listed == _sizes(folder))


def _into_folder(run: TrainedRun, evaluation: Evaluation, options: PublishOptionsConfig, target: Path) -> None:
    """Write the folder `target`, completely or not at all."""
    _check_target(target)
    place = target.resolve()
    with one_line(target, ""), _folder_beside(place) as beside:
        # Not the modes of the run's files, which only their owner may read.
        _fill(beside / "draft", run, evaluation, options, shutil.copyfile)
        sync_tree(beside / "draft")
        # Checked again, since copying a large model takes minutes.
        _check_target(target)
        replace_folder(place, beside / "draft", beside / "old")


def _check_target(target: Path) -> None:
    is_free = not target.exists() or (target.is_dir() and (not any(target.iterdir()) or _is_publication(target)))
    refuse(
        target.is_symlink() or not is_free or target.resolve() == Path.cwd(),
        f"publish.folder {target} holds something other than an unchanged publication, or is the current folder: give"
        " another folder, or move it away",
    )


@contextmanager
def _folder_beside(target: Path) -> Iterator[Path]:
    """Yield a temporary folder on the same disk as `target`, an absolute path."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{target.name}_", dir=target.parent, ignore_cleanup_errors=True) as beside:
        yield Path(beside)


def _onto_hub(run: TrainedRun, evaluation: Evaluation, options: PublishOptionsConfig, name: str) -> None:
    """Create the repository if there is none, and upload everything in one commit."""
    refuse("/" not in name, f"publish.hub {name} has no owner: give it as you/{name}")
    # On the disk of the run, where hard links save a copy of the weights.
    place = run.folder.resolve()
    with one_line(place, ""), _folder_beside(place / "publication") as beside:
        _fill(beside / "draft", run, evaluation, options, _link)
        with _refused_by_hub(name):
            api = huggingface_hub.HfApi()
            api.create_repo(name, private=options.private, exist_ok=True)
            files = set(api.list_repo_files(name)) - {".gitattributes"}
            refuse(
                bool(files) and CONTENTS not in files,
                f"publish.hub {name} has files that do not belong to a publication: name another repository",
            )
            api.upload_folder(
                repo_id=name,
                folder_path=beside / "draft",
                commit_message=f"{run.folder.resolve().name} after step {run.step}",
                # An earlier publication may have had more parts.
                delete_patterns=["*.safetensors", "*.safetensors.index.json"],
            )


@contextmanager
def _refused_by_hub(name: str) -> Iterator[None]:
    """Turn an error of the hub, or of the network, into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except (HTTPError, OSError, ValueError) as error:
        reason = getattr(error, "server_message", None) or (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"publish.hub {name} cannot be written: {reason}: check that the hub is reachable and that you are logged"
            " in (hf auth whoami), or give publish.folder"
        ) from error


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system has no hard links
        shutil.copy2(source, target)
