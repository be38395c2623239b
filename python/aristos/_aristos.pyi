"""The native part of the package. It checks the shapes and types of the views that `_experts.py` makes of contiguous tensors."""

# Address, shape and type of a contiguous tensor in host memory.
_View = tuple[int, tuple[int, ...], str]

class AristosError(RuntimeError): ...

class Rendezvous:
    address: str

    def __new__(cls, address: str) -> Rendezvous: ...
    @staticmethod
    def listen(host: str) -> Rendezvous: ...

class Layer:
    notes: list[str]

    def __new__(
        cls,
        key: str,
        rank: int,
        size: int,
        rendezvous: Rendezvous | None = None,
        *,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int,
        activation: str,
        gated: bool,
        bias: bool,
        limit: float,
        limit_after: bool,
        plus_one: bool,
        dtype: str,
        max_tokens: int,
        wait_limit_s: float,
    ) -> Layer: ...
    def forward(self, tensors: list[_View], experts: list[_View | None]) -> Saved: ...
    def grown(self, key: str) -> Layer | None: ...
    def leave(self) -> None: ...
    def sent_bytes(self) -> int: ...
    def measured(self) -> dict[str, int | float]: ...

# This class exists only in a wheel that is built with devices.
class DeviceLayer:
    def __new__(
        cls,
        key: str,
        rank: int,
        size: int,
        *,
        device: str,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int,
        activation: str,
        gated: bool,
        bias: bool,
        limit: float,
        limit_after: bool,
        plus_one: bool,
        dtype: str,
        max_tokens: int,
        wait_limit_s: float,
        spare_multiprocessors: int,
        number: int = 0,
        communicator: int | None = None,
    ) -> DeviceLayer: ...
    def state_bytes(self) -> int: ...
    def symmetric_bytes(self) -> int: ...
    def blocks(self) -> int: ...
    def forward(self, tokens: int, tensors: list[int], experts: list[int], state: int, *, wide_ids: bool, stream: int | None) -> None: ...
    def backward(
        self,
        tokens: int,
        tensors: list[int],
        experts: list[int],
        gradients: list[int],
        state: int,
        *,
        accumulate: bool,
        stream: int | None,
    ) -> None: ...
    def check(self) -> None: ...

class Saved:
    def backward(self, tensors: list[_View], experts: list[_View | None], gradients: list[_View | None] | None) -> None: ...

DEVICES: list[str]

def families() -> list[str]: ...
def rebalance_experts(
    weight: list[list[float]],
    num_replicas: int | None,
    num_groups: int,
    num_nodes: int,
    num_ranks: int,
    imbalance: float | None,
    current: list[list[int]] | None,
    move_cost: float,
    shares: bool,
) -> tuple[list[list[int]], list[list[list[int]]], list[list[int]], list[list[float]]]: ...
def family_expert(config: str) -> dict[str, str | bool | float]: ...
def family_sizes(config: str) -> tuple[int, int, int]: ...
def window_bytes(hidden: int, experts: int, top_k: int, dtype: str, max_tokens: int, size: int) -> int: ...
def instruction_set() -> str: ...
def set_saved_folder(folder: str) -> None: ...
def how_to_restart() -> str: ...
def local_experts(experts: int, rank: int, size: int) -> list[int]: ...
