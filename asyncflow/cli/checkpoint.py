"""``asyncflow checkpoint``: contents, checks and comparison of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

import numpy as np

from asyncflow.checkpoint.directory import find_step, step_path, steps
from asyncflow.checkpoint.manifest import Manifest, StateRecord, read_manifest
from asyncflow.checkpoint.reader import read_arrays, verify
from asyncflow.devices.memory import format_bytes
from asyncflow.errors import CheckpointError, counted
from asyncflow.values import Array

ACTIONS = {
    "list": "the steps in a directory, or one step",
    "show": "contents of a step",
    "verify": "read all of a step, and check every byte",
    "diff": "compare two steps, or the latest two of a directory",
}


def checkpoint(action: str, paths: Sequence[Path]) -> int:
    """Print the answer, and return the exit code: 1 for a damaged step, or two steps that differ.

    Raises:
        CheckpointError: there is no such checkpoint, or its manifest is damaged.
    """
    if action == "list":
        lines = list(_listed(paths[0]))
    elif action == "show":
        lines = list(_shown(find_step(paths[0])))
    elif action == "verify":
        return _verified(find_step(paths[0]))
    else:
        lines = list(_differences(*_two(paths)))
        print("\n".join(lines) or "no difference in the written data; verify checks the files")
        return int(bool(lines))
    print("\n".join(lines))
    return 0


def _listed(root: Path) -> Iterator[str]:
    # Without steps inside, `root` may be a step itself: `find_step` returns it, or raises an error that says why not.
    for path in [step_path(root, step) for step in steps(root)] or [find_step(root)]:
        manifest = read_manifest(path)
        count = len(manifest.states)
        yield f"{path}  {count} {'state' if count == 1 else 'states'}, {format_bytes(_nbytes(manifest))}"


def _shown(path: Path) -> Iterator[str]:
    manifest = read_manifest(path)
    yield f"{path}: step {manifest.step}, {format_bytes(_nbytes(manifest))}"
    yield f"written by {', '.join(f'{name} {version}' for name, version in sorted(manifest.versions.items()))}"
    yield f"graph {manifest.graph or 'none'}"
    if manifest.random is not None:
        yield f"random numbers after {counted(manifest.random.runs, 'run')}"
    width = max(map(len, manifest.states), default=0)
    for name, state in sorted(manifest.states.items()):
        yield f"{name:<{width}}  {state.kind}  {_described(state)}".rstrip()


def _described(state: StateRecord) -> str:
    tensors = [(part, f"{x.dtype}[{','.join(map(str, x.shape))}]") for part, x in sorted(state.tensors.items())]
    return ", ".join(f"{part} {spec}".strip() for part, spec in tensors) or "no value yet"


def _nbytes(manifest: Manifest) -> int:
    return sum(record.nbytes for records in manifest.files().values() for record in records)


def _verified(path: Path) -> int:
    manifest = read_manifest(path)
    faults = verify(path, manifest)
    print("\n".join(faults) or f"{path}: {format_bytes(_nbytes(manifest))}, all as they were written")
    return int(bool(faults))


def _two(paths: Sequence[Path]) -> tuple[Path, Path]:
    if len(paths) == 2:
        return find_step(paths[0]), find_step(paths[1])
    found = steps(paths[0])
    if len(found) < 2:
        raise CheckpointError(f"{paths[0]}: has not two steps to compare; name the other one, too")
    return step_path(paths[0], found[-2]), step_path(paths[0], found[-1])


def _differences(first: Path, second: Path) -> Iterator[str]:
    manifests = read_manifest(first), read_manifest(second)
    before, after = manifests[0].states, manifests[1].states
    if manifests[0].graph != manifests[1].graph:
        yield "the graphs differ"
    yield from (f"- {name}  {_described(before[name])}" for name in sorted(before.keys() - after.keys()))
    yield from (f"+ {name}  {_described(after[name])}" for name in sorted(after.keys() - before.keys()))
    changed = [name for name in sorted(before.keys() & after.keys()) if before[name] != after[name]]
    arrays = []
    for path, manifest in zip((first, second), manifests, strict=True):
        found, faults = read_arrays(path, manifest, changed)
        if faults:
            raise CheckpointError("\n  ".join(faults))
        arrays.append(found)
    for name in changed:
        if _described(before[name]) != _described(after[name]):
            yield f"  {name}  {_described(before[name])} became {_described(after[name])}"
            continue
        for part, old in sorted(arrays[0][name].items()):
            if before[name].tensors[part] != after[name].tensors[part]:
                yield f"  {name}{f' {part}' if part else ''}  {_compared(old, arrays[1][name][part])}"


def _compared(old: Array, new: Array) -> str:
    """Says how far two arrays of one dtype and shape are apart."""
    count = f"{int(np.sum(old != new))} of {prod(old.shape)} changed"
    if old.dtype.kind not in "biufc":
        return count
    with np.errstate(all="ignore"):
        apart = np.abs(new.astype(np.complex128) - old.astype(np.complex128))
    return f"{count}, by {np.max(apart):.6g} at most"
