"""What an update will bring, from whatever names it: a manifest, the digest of one, or a directory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from weight_updater import from_disk
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import BeginUpdate, Manifest, Path, TensorSpec
from weight_updater.safetensors_header import Headers

MAX_MANIFESTS = 16
"""Manifests that are remembered by digest; the least recently used one goes first."""


class Manifests:
    """Remembers manifests. Safe to use by any thread.

    Args:
        roots: directories that the disk path may read.

    Attributes:
        headers: of the checkpoint that an update read last.
    """

    def __init__(self, roots: Sequence[str]) -> None:
        self.headers = Headers()
        self._roots = tuple(roots)
        self._known: OrderedDict[str, Manifest] = OrderedDict()  # without checksums
        self._lock = threading.Lock()

    def remember(self, manifest: Manifest, digest: str) -> None:
        """Keep a manifest for later updates, which may name it by its digest."""
        with self._lock:
            if digest not in self._known:
                self._known[digest] = Manifest.of(manifest.columns)
            self._known.move_to_end(digest)
            while len(self._known) > MAX_MANIFESTS:
                self._known.popitem(last=False)

    def resolve(self, request: BeginUpdate) -> Manifest:
        """The manifest of an update, with the checksums that came for it.

        Raises:
            UpdateRefused: INVALID_UPDATE, MANIFEST_UNKNOWN, MANIFEST_MISMATCH, or what the files refuse.
        """
        given = self._given(request)
        if request.path is Path.DISK and request.directory:
            found = from_disk.read_manifest(self.directory(request.directory), self.headers)
            return found if given is None else _both(given, found, request.directory)
        if given is None:
            raise UpdateRefused(
                Reason.INVALID_UPDATE,
                "an update needs a manifest, the digest of a known one, or (disk) a directory",
            )
        return given

    def directory(self, directory: str) -> str:
        """The real path of a directory under one of the roots.

        Raises:
            UpdateRefused (PATH_FORBIDDEN): it lies elsewhere.
        """
        return from_disk.allowed_directory(directory, self._roots)

    def _given(self, request: BeginUpdate) -> Manifest | None:
        manifest = request.manifest
        if manifest is None and request.manifest_digest:
            with self._lock:
                manifest = self._known.get(request.manifest_digest)
            if manifest is None:
                raise UpdateRefused(
                    Reason.MANIFEST_UNKNOWN,
                    f"no manifest with digest {request.manifest_digest} is known here; send it in full once",
                )
        if manifest is None or not request.checksums:
            return manifest
        if len(request.checksums) != len(manifest):
            raise UpdateRefused(
                Reason.INVALID_UPDATE,
                f"{len(request.checksums)} checksums came for a manifest of {len(manifest)} tensors",
            )
        return manifest.with_checksums(request.checksums)


def digest_of(manifest: Manifest, request: BeginUpdate) -> str:
    """The digest of what `request` resolved to; files may have another order than what it names."""
    by_digest = request.manifest is None and request.manifest_digest and request.path is not Path.DISK
    return request.manifest_digest if by_digest else manifest.digest()


def check_files(manifest: Manifest, found: Manifest, directory: str) -> None:
    """Refuse files that changed since the update began. `found` may lack checksums that the sender gave."""
    if manifest == found:
        return
    if len(manifest) != len(found):
        raise UpdateRefused(
            Reason.MANIFEST_MISMATCH,
            f"{directory} has {len(found)} tensors, the update began with {len(manifest)}",
        )
    for agreed, tensor in zip(manifest.tensors, found.tensors, strict=True):
        same = (agreed.name, agreed.dtype, agreed.shape) == (tensor.name, tensor.dtype, tensor.shape)
        if not same or (tensor.checksum is not None and tensor.checksum != agreed.checksum):
            raise UpdateRefused(
                Reason.MANIFEST_MISMATCH,
                f"{directory} has {_describe(tensor)} where the update began with {_describe(agreed)}; "
                f"did somebody write there? begin again",
            )


def _both(given: Manifest, found: Manifest, directory: str) -> Manifest:
    """The files' manifest in their order, with the sender's checksums where the files have none."""
    by_name = {tensor.name: tensor for tensor in given.tensors}
    merged = []
    for tensor in found.tensors:
        asked = by_name.pop(tensor.name, None)
        if asked is None or (asked.dtype, asked.shape) != (tensor.dtype, tensor.shape):
            raise UpdateRefused(
                Reason.MANIFEST_MISMATCH,
                f"{directory} has {_describe(tensor)}, the manifest has {_describe(asked)}",
            )
        if None not in (asked.checksum, tensor.checksum) and asked.checksum != tensor.checksum:
            raise UpdateRefused(
                Reason.CHECKSUM_MISMATCH,
                f"{directory} has {_describe(tensor)}, the manifest has {_describe(asked)}",
            )
        merged.append(tensor if asked.checksum is None else asked)
    for asked in by_name.values():
        raise UpdateRefused(
            Reason.MANIFEST_MISMATCH,
            f"{directory} lacks {asked.name}, which the manifest has (and {len(by_name) - 1} more)",
        )
    return Manifest(tuple(merged))


def _describe(tensor: TensorSpec | None) -> str:
    if tensor is None:
        return "no tensor of that name"
    checksum = "" if tensor.checksum is None else f" with checksum {tensor.checksum:016x}"
    return f"{tensor.name} ({tensor.dtype} {list(tensor.shape)}{checksum})"
