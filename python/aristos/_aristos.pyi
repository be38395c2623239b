"""The native part. It takes addresses of contiguous tensors, which `_experts.py` has checked."""

class AristosError(RuntimeError): ...

class Layer:
    def __new__(
        cls,
        key: str,
        rank: int,
        size: int,
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
    def forward(self, tokens: int, tensors: list[int], experts: list[int]) -> Saved: ...
    def sent_bytes(self) -> int: ...

class Saved:
    def backward(self, tensors: list[int], experts: list[int], gradients: list[int]) -> None: ...

def families() -> list[str]: ...
def family_expert(config: str) -> dict[str, str | bool | float]: ...
def local_experts(experts: int, rank: int, size: int) -> list[int]: ...
