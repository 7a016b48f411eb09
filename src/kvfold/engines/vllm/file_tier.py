"""Pages in files, below those in CPU memory. Each file ends with a checksum, and is refused if it was changed."""

import mmap
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.io import O_DIRECT
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from kvfold.engines.stored_pages import CHECKSUM_BYTES, checksum

Files = Iterable[tuple[Path, memoryview]]  # where the pages of a key are stored, and where they lie in CPU memory


class CheckedFileTier(FileSystemTierManager):
    """vLLM's tier of files, with a checksum behind the pages of each file. A refused file is deleted. vLLM takes it for
    a miss, and computes its tokens again."""

    def __init__(self, *arguments: Any, root_dir: str, **options: Any) -> None:
        super().__init__(*arguments, root_dir=root_dir, **options)
        self._root = Path(root_dir)

    def submit_store(self, job_metadata: TransferJob) -> None:
        if self.events is not None:
            self._store_job_keys[job_metadata.job_id] = list(job_metadata.keys)
        files = self._files(job_metadata)
        self._pool.enqueue_store(job_metadata.job_id, 1, [partial(self._store, files)])

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._load_job_keys[job_metadata.job_id] = list(job_metadata.keys)
        files = self._files(job_metadata)
        self._pool.enqueue_load(job_metadata.job_id, 1, [partial(self._load, job_metadata.job_id, files)])

    def _files(self, job: TransferJob) -> Files:
        self._job_block_counts[job.job_id] = len(job.keys)
        memory, size = self._primary_kv_view.cast("B"), self._block_size
        return [
            (Path(self.file_mapper.get_file_name(key)), memory[chunk * size : (chunk + 1) * size])
            for key, chunk in zip(job.keys, job.chunk_ids.tolist(), strict=True)
        ]

    def _store(self, files: Files) -> None:
        for path, pages in files:
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(f".{os.getpid()}-{get_ident()}.tmp")
            end = mmap.mmap(-1, mmap.PAGESIZE)
            end.write(self._checksum(path, pages))
            try:
                self._transfer(os.writev, unfinished, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, pages, end)
                unfinished.replace(path)
            finally:
                unfinished.unlink(missing_ok=True)

    def _load(self, job: int, files: Files) -> None:
        for count, (path, pages) in enumerate(files):
            self._load_progress[job] = count
            end = mmap.mmap(-1, mmap.PAGESIZE)
            self._transfer(os.readv, path, os.O_RDONLY, pages, end)
            if end[:CHECKSUM_BYTES] != self._checksum(path, pages):
                from kvfold.engines.gauges import count_refused_page  # only after vLLM has set up prometheus_client

                path.unlink(missing_ok=True)
                count_refused_page()
                raise OSError(f"{path} was changed after it was stored: it is deleted, and not read")

    def _transfer(self, move: Callable[..., int], path: Path, flags: int, pages: memoryview, end: mmap.mmap) -> None:
        """Write or read pages and what follows them, a page of memory as O_DIRECT needs."""
        file = os.open(path, flags | (O_DIRECT if self._use_o_direct else 0), 0o644)
        try:
            if move(file, [pages, end]) < len(pages) + len(end) and move is os.writev:
                raise OSError(f"{path} could not be written as a whole")
        finally:
            os.close(file)

    def _checksum(self, path: Path, pages: memoryview) -> bytes:
        return checksum(str(path.relative_to(self._root.parent)), pages)
