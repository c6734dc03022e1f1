"""Node look: what one node of a cluster has, told by a task that runs there. Standard library alone.

What is here travels to the node as code, not by name, so that a node without this package can still say so.
Not here: what is expected of a node (node_check).
"""

from __future__ import annotations


def version_of(package: str) -> str | None:
    """The version that is installed here; None where the package is not."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def look(packages: list[str], reads: dict[str, str], writes: str, word: str) -> dict[str, object]:
    """Versions of `packages` (None where there is none), the digest of this package's own code, the SHA-256 of every
    file in `reads`, and whether `word` could be written into the file `writes`; what failed is said in words."""
    import hashlib
    import importlib.util
    import os
    import platform
    import sys
    from pathlib import Path

    def code() -> str | None:
        found = importlib.util.find_spec("workbench")
        if found is None or found.origin is None:
            return None
        root, digest = Path(found.origin).parent, hashlib.sha256()
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()

    def digest(path: str) -> str:
        try:
            return hashlib.sha256(Path(path).read_bytes()).hexdigest()
        except OSError as error:
            return f"{type(error).__name__}: {error.strerror}"

    def write() -> str:
        try:
            with open(writes, "w") as file:
                file.write(word)
                file.flush()
                os.fsync(file.fileno())
            return "written"
        except OSError as error:
            return f"{type(error).__name__}: {error.strerror}"

    return {
        "host": platform.node(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": {name: version_of(name) for name in packages},
        "code": code(),
        "reads": {path: digest(path) for path in reads},
        "written": write(),
    }
