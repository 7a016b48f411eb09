"""push and pull: an artifact to the Hub or to a folder, and back."""

from pathlib import Path

from kvfold import hub
from kvfold.artifact import Artifact, digest_model
from kvfold.artifact.artifact import CARD, METADATA, TENSORS, check_place, find
from kvfold.files import claimed, write_whole
from kvfold.models import complete_config
from kvfold.publish.card import card, is_card

PATHS = (".", "/", "~")  # how the paths of folders begin that need not exist


def push(folder: Path, where: str, model: str | None = None, private: bool = False) -> str:
    """Write an artifact and its card to a folder, or to the Hub by its id there. Returns its address.

    The artifact must belong to `model`, if that is given.
    """
    files = _published(folder, where, model)
    if where.startswith(PATHS) or Path(where).is_dir():
        _write(Path(where).expanduser(), files, same=TENSORS)  # a later check may be published
        return where
    from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_download

    if hub.silent():
        raise OSError(f"cannot push to {where}: {hub.unreachable()}. A folder is written as ./{where}")
    try:
        api = HfApi()
        if api.repo_exists(where) and api.file_exists(where, CARD):
            _check_card(Path(hf_hub_download(where, CARD)).read_bytes(), files[CARD], where)
        address = api.create_repo(where, private=private or None, exist_ok=True)
        added = [CommitOperationAdd(name, content) for name, content in files.items()]
        api.create_commit(where, added, commit_message="Add an artifact of kvfold")
    except FileExistsError:
        raise
    except Exception as error:  # its type depends on the HTTP library of the Hub's client
        status = getattr(getattr(error, "response", None), "status_code", None)
        fix = ": run `hf auth login`, with a token that may write there" if status in (401, 403) else ""
        raise OSError(f"cannot push to {where}: {error}{fix}") from None
    return str(address)


def pull(where: str, folder: Path) -> Artifact:
    """Write an artifact of the Hub, or of another folder, to this folder."""
    source = find(where)
    artifact = Artifact.load(source)
    names = (TENSORS, METADATA, *([CARD] if (source / CARD).is_file() else []))
    _write(folder, {name: (source / name).read_bytes() for name in names}, same=METADATA)  # keeps checks made there
    return artifact


def _published(folder: Path, where: str, model: str | None) -> dict[str, bytes]:
    """The files that are published, by name."""
    artifact = Artifact.load(folder)  # refuses an artifact that is not valid
    if model is not None:
        artifact.metadata.model.check_files(complete_config(model), digest_model(model))
    files = {name: (folder / name).read_bytes() for name in (TENSORS, METADATA)}
    return {**files, CARD: card(artifact, where, model).encode()}


def _write(folder: Path, files: dict[str, bytes], same: str) -> None:
    """Refuses a folder with another artifact, one whose file `same` differs, and one with a README.md that kvfold did
    not write."""
    check_place(folder)
    with claimed(folder):
        there = folder / same
        if there.exists() and there.read_bytes() != files[same]:
            raise FileExistsError(f"{folder} holds another artifact: name a new folder")
        if CARD in files and (folder / CARD).exists():
            _check_card((folder / CARD).read_bytes(), files[CARD], str(folder))
        write_whole(folder, files)


def _check_card(there: bytes, new: bytes, where: str) -> None:
    if there != new and not is_card(there):
        raise FileExistsError(
            f"{where} has a {CARD} that kvfold did not write, or that was changed since: move it away, or name another "
            "place"
        )
