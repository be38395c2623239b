"""Checkpoints of modules with `MoE` layers. They are sharded safetensors files with Hugging Face names.

A save writes its shards under new names. In its last step the new index, which names the shards, replaces the previous index by a rename.
The folder therefore always holds the weights of exactly one save, even if a process is killed.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat

import torch
from torch import nn

from . import _aristos, _group, _parameters
from ._moe import BIAS_NAME, EXPERT_NAMES, MoE

_INDEX = "model.safetensors.index.json"
_ONE_FILE = "model.safetensors"
_LOCK = ".aristos-save.lock"
# The names that a save uses for its shards, for the folders in which they are written, and for its index before the rename.
_OWN_NAMES = re.compile(r"model-[0-9a-f]{16}-\d{5,}-of-\d{5,}\.safetensors|\.aristos-[0-9a-f]{16}-(\d+|index)\.tmp")
# The time limit of a save assumes that the disk is at least this fast.
_MIN_BYTES_PER_S = 10_000_000


def save(module: nn.Module, folder: str | os.PathLike, group: _group.Group | None = None) -> None:
    """Writes a module's weights as a sharded safetensors checkpoint with Hugging Face names. Each process writes its own experts.
    Collective.

    The previous checkpoint in the folder is kept until the new one is complete and on disk, and is then removed. If a process fails or is
    killed, `load` reads either the previous checkpoint or the new one.

    Args:
        module: a module that contains `MoE` layers.
        folder: the folder, which must be the same on all processes. It is created if it is missing. The disk needs space for both
            checkpoints.
        group: a `Group`; the default has all processes.

    Raises:
        RuntimeError: if another save into the folder is running, or if another process has failed. The previous checkpoint is unchanged.
        OSError: if this process cannot write its file. The previous checkpoint is unchanged.
        AristosError: if another process is missing after the wait limit plus one second for each 10 MB of the largest shard.
    """
    with contextlib.ExitStack() as held:
        _Save(module, os.fspath(folder), group or _group.default(), held).run()


class _Save:
    """One save on one process."""

    def __init__(self, module, folder, group, held):
        self.module, self.folder, self.group, self.held = module, folder, group, held
        self.tensors, self.token, self.extra_s, self.shard = {}, None, 0.0, None

    def run(self):
        # No process collects, which is collective for some modules, before all have begun.
        self.token = self.on_all(self.begin)[0]
        self.extra_s = max(self.on_all(self.collect)) / _MIN_BYTES_PER_S
        self.shard = f"model-{self.token}-{self.group.rank + 1:05}-of-{self.group.size:05}.safetensors"
        written = self.on_all(self.write)
        previous = self.on_all(lambda: self.publish(written) if self.group.rank == 0 else None)[0]
        # The new index is in place now, so the shards are kept even if a later step fails.
        self.shard = None
        _aristos.set_saved_folder(os.path.abspath(self.folder))
        self.on_all(lambda: self.remove_old(previous, written) if self.group.rank == 0 else None)

    def on_all(self, step):
        """Runs a step on all processes and returns all results, in rank order. If the step fails on one process, all processes remove their
        shards and raise an error."""
        result = failure = None
        try:
            result = step()
        except Exception as error:
            failure = error
        outcome = (result, failure and f"{type(failure).__name__}: {failure}")
        # If this call raises an error, no shard is removed, because rank 0 may have received all results and then publishes them.
        outcomes = self.group.gather(outcome, purpose="save", limit_s=self.group.wait_limit_s + self.extra_s)
        failed = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(outcomes) if why]
        if failed:
            if self.shard is not None:
                with contextlib.suppress(OSError):
                    os.remove(os.path.join(self.folder, self.shard))
            raise failure or RuntimeError(f"{self.folder}: not saved: {failed[0]}")
        return [result for result, _ in outcomes]

    def begin(self):
        """Returns the save's token (rank 0)."""
        _group.check_all()
        if self.group.rank:
            return None
        os.makedirs(self.folder, exist_ok=True)
        self.held.enter_context(_locked(self.folder))
        return secrets.token_hex(8)

    def collect(self):
        """Returns the bytes of this process's shard. Collective if the module has other DTensors than its experts."""
        state, own = self.module.state_dict(), {}
        for prefix, part in _layers(self.module):
            blocks = []
            for name in EXPERT_NAMES:
                if prefix + name not in state:
                    raise ValueError(f"{prefix}{name} is missing from the module's state_dict: merge adapters before a save")
                blocks.append(part.own_experts(prefix + name, state.pop(prefix + name)))
            own |= part.matrices(prefix, *blocks)
            if part.correction_bias is not None:
                state[prefix + BIAS_NAME] = state.pop(f"{prefix}correction_bias")
        for name, tensor in state.items():
            # Only rank 0 keeps a gathered tensor, in host memory, because all of them may not fit into a device's.
            gathered = tensor.full_tensor() if _parameters.is_dtensor(tensor) else tensor
            if self.group.rank == 0:
                own[name] = gathered if gathered is tensor else gathered.cpu()
            del gathered
        self.tensors = {name: tensor.contiguous() for name, tensor in own.items()}
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def temporary(self, part):
        return os.path.join(self.folder, f".aristos-{self.token}-{part}.tmp")

    def write(self):
        """Writes this process's shard to disk. Returns the shard's name, its size, and the names of its tensors."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = os.path.join(self.folder, self.shard)
        # save_file writes a temporary file next to its target. The target is in a folder of its own, so that the next save finds and
        # removes that file if this process is killed.
        temporary = self.temporary(self.group.rank)
        os.mkdir(temporary)
        try:
            written = os.path.join(temporary, self.shard)
            save_file(self.tensors, written, metadata={"format": "pt"})
            # The copies to the host have waited for the devices. Results of a failed pass must not reach a checkpoint.
            _group.check_all()
            _sync(written)
            os.rename(written, path)
        except SafetensorError as error:
            raise OSError(f"{path}: {error}") from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return self.shard, os.path.getsize(path), list(self.tensors)

    def publish(self, written):
        """Replaces the index. Returns the files that the previous index names."""
        for rank, (shard, size, _) in enumerate(written):
            path = os.path.join(self.folder, shard)
            if not os.path.exists(path) or os.path.getsize(path) != size:
                raise ValueError(f"{path}: missing or not of {size} bytes: rank {rank} saved into another folder, expected the same on all")
        previous = set()
        with contextlib.suppress(OSError, ValueError):
            previous = set(_read_index(self.folder).values())
        weight_map = {name: shard for shard, _, names in written for name in names}
        temporary = self.temporary("index")
        try:
            with open(temporary, "x") as index:
                json.dump({"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}, index, indent=1)
            _sync(temporary)
            # The names of the shards must be on disk before the index that refers to them.
            _sync(self.folder)
            os.replace(temporary, os.path.join(self.folder, _INDEX))
        except OSError:
            with contextlib.suppress(OSError):
                os.remove(temporary)
            raise
        return previous

    def remove_old(self, previous, written):
        """Removes the previous checkpoint's files, and those of saves that were killed."""
        # The new checkpoint is in place. If a removal fails, the next save tries again.
        with contextlib.suppress(OSError):
            _sync(self.folder)
            for name in set(os.listdir(self.folder)) - {shard for shard, _, _ in written}:
                path = os.path.join(self.folder, name)
                with contextlib.suppress(OSError):
                    if _OWN_NAMES.fullmatch(name) and os.path.isdir(path):
                        shutil.rmtree(path)
                    # The previous index may be of another program, and name other files than shards.
                    elif _OWN_NAMES.fullmatch(name) or (name in previous and name.endswith(".safetensors")):
                        os.remove(path)


@contextlib.contextmanager
def _locked(folder):
    """Holds the folder's lock. The system releases it if the process dies."""
    path = os.path.join(folder, _LOCK)
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The process that held the lock may have removed the file between open and flock.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(path)):
                    break
        except BlockingIOError:
            os.close(lock)
            raise RuntimeError(f"{folder}: another save into this folder is running, expected one at a time") from None
        os.close(lock)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.remove(path)
        os.close(lock)


def _sync(path):
    """Waits until a file or folder is on disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _layers(module):
    """Returns the `MoE` layers of a module, each after the prefix of its names."""
    return [(f"{name}." if name else "", part) for name, part in module.named_modules() if isinstance(part, MoE)]


def load(module: nn.Module, folder: str | os.PathLike) -> None:
    """Loads a checkpoint that `save` has written, or any safetensors checkpoint with the same names, in shards with an index or in the file
    `model.safetensors`. The experts may also have the names of the parameters. The number of processes need not be that of the save.
    Parameters on the device "meta" are replaced by tensors in host memory.

    Reads only files in the folder. All weights come from the same checkpoint, even if a save into the folder ends at the same time.

    Raises:
        RuntimeError: if names are missing or shapes differ.
        ValueError: if a file is malformed. The message names the file and the wrong entry.
    """
    from safetensors import SafetensorError

    folder = os.fspath(folder)
    parameters = module.state_dict()
    names, blocks = set(parameters), {}
    for prefix, part in _layers(module):
        own = (part.own_experts(prefix + one, part.get_parameter(one)) for one in EXPERT_NAMES)
        names.update(name for name, _ in part.matrices(prefix, *own))
        names.add(prefix + BIAS_NAME)
        blocks |= dict.fromkeys((prefix + one for one in EXPERT_NAMES), part)
    with contextlib.ExitStack() as opened:
        weight_map, files = _open_shards(folder, names, opened)
        state = {}
        for name in names & weight_map.keys():
            try:
                if name in blocks:
                    # Only the rows of this process's experts are read.
                    part, stored = blocks[name], files[weight_map[name]].get_slice(name)
                    rows = slice(part.local[0], part.local[-1] + 1)
                    fits = stored.get_shape() == list(parameters[name].shape)
                    state[name] = _parameters.sharded(stored[rows], part.group) if fits else stored[:]
                    continue
                state[name] = files[weight_map[name]].get_tensor(name)
            except SafetensorError as error:
                raise ValueError(f"{os.path.join(folder, weight_map[name])}: {name}: {error}") from None
            parameter = parameters.get(name)
            if parameter is not None and parameter.shape == state[name].shape:
                state[name] = _parameters.distributed_like(state[name], parameter)
        with _in_host_memory(module):
            module.load_state_dict(state)


@contextlib.contextmanager
def _in_host_memory(module):
    """Replaces the module's tensors on the device "meta" by tensors in host memory. An error inside of the context undoes that."""
    replaced, made = [], {}
    for part in module.modules():
        for slot in (part._parameters, part._buffers):
            for name, tensor in slot.items():
                if tensor is None or not tensor.is_meta or name in part._non_persistent_buffers_set:
                    continue
                if id(tensor) not in made:
                    empty = torch.empty_like(tensor, device="cpu")
                    made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
                replaced.append((slot, name, tensor))
                slot[name] = made[id(tensor)]
    try:
        yield
    except BaseException:
        for slot, name, tensor in replaced:
            slot[name] = tensor
        raise


def _open_shards(folder, names, opened):
    """Returns the weight map, and the opened files of these tensors by file name."""
    weight_map = _read_index(folder)
    while True:
        try:
            files = {weight_map[name] for name in names if name in weight_map}
            return weight_map, {file: opened.enter_context(_open_shard(os.path.join(folder, file))) for file in sorted(files)}
        except FileNotFoundError:
            # The file is missing if a save has just ended, because it removes the files of the previous index.
            before, weight_map = weight_map, _read_index(folder)
            if weight_map == before:
                raise


def _open_shard(path):
    from safetensors import SafetensorError, safe_open

    # Opening a pipe would wait for a writer.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{path}: not a regular file, expected safetensors")
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise ValueError(f"{path}: {error}") from None
    except RuntimeError:
        # safe_open opens the file twice. torch, which opens it last, raises this error if the file is missing by then.
        if not os.path.exists(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        raise


def _read_index(folder):
    """Returns the file of each tensor, by the tensor's name. Every file is a name without a folder."""
    path = os.path.join(folder, _INDEX)
    one_file = os.path.join(folder, _ONE_FILE)
    if not os.path.exists(path) and os.path.exists(one_file):
        with _open_shard(one_file) as opened:
            return dict.fromkeys(opened.keys(), _ONE_FILE)
    expected = "expected an object with a weight_map"
    try:
        with open(path, encoding="utf-8") as index:
            content = json.load(index)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON, {expected}: {error}") from None
    if not isinstance(content, dict) or "weight_map" not in content:
        raise ValueError(f"{path}: {_shown(content)}, {expected}")
    weight_map = content["weight_map"]
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path}: weight_map is {_shown(weight_map)}, expected an object: the file name of each tensor")
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\0" in file:
            raise ValueError(f"{path}: weight_map[{_shown(name)}] is {_shown(file)}, expected the name of a file in this folder")
    return weight_map


def _shown(value, most=60):
    """Returns a JSON value as text on one line, shortened if it is long."""
    text = json.dumps(value)
    return text if len(text) <= most else f"{text[:most]}..."
