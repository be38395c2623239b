"""Checks `aristos.rebalance_experts`."""

import sys

import torch
from harness import refused, run_here

import aristos


def hot(*loads):
    return torch.tensor([[100.0] * (256 - len(loads)) + list(loads), [7.0] * 256])


def results_are_eplbs():
    weight = hot(20_000, 20_000)
    phy2log, log2phy, logcnt = aristos.rebalance_experts(weight, 288, 1, 1, 32)
    assert phy2log.shape == (2, 288) and logcnt.sum(1).tolist() == [288, 288] and phy2log.dtype == log2phy.dtype == torch.int64
    assert log2phy.shape == (2, 256, logcnt.max())
    for layer in range(2):
        assert torch.equal(phy2log[layer].bincount(minlength=256), logcnt[layer])
        for expert, slots in enumerate(log2phy[layer].tolist()):
            count = logcnt[layer, expert]
            assert all(phy2log[layer, slot] == expert for slot in slots[:count]) and slots[count:] == [-1] * (len(slots) - count)
    loads = (weight[0] / logcnt[0])[phy2log[0]].view(32, 9).sum(1)
    assert loads.max() < 1.01 * loads.mean()
    assert all(len(set(rank)) == 9 for rank in phy2log[0].view(32, 9).tolist())


def shares_level_all_loads():
    weight = hot(3000, 3000, 3000)
    phy2log, _, _, shares = aristos.rebalance_experts(weight, 288, 1, 1, 32, shares=True)
    loads = (weight[0].double()[phy2log[0]] * shares[0]).view(32, 9).sum(1)
    assert loads.max() < 1.001 * loads.mean()


def few_experts_leave_the_placement_in_use():
    gen = torch.Generator().manual_seed(1)
    weight = torch.rand(1, 256, generator=gen) * 44_000 + 1000
    first, _, _ = aristos.rebalance_experts(weight, 288, 8, 4, 32)
    changed = weight * (0.98 + 0.04 * torch.rand(1, 256, generator=gen))
    next_, _, _ = aristos.rebalance_experts(changed, 288, 8, 4, 32, current=first)
    assert (first != next_).sum() <= 14


def least_number_is_found():
    weight = torch.arange(1.0, 161.0)[None]
    assert aristos.rebalance_experts(weight, "auto", 1, 1, 12)[0].shape == (1, 168)
    assert aristos.rebalance_experts(weight, "auto", 1, 1, 12, imbalance=1.001)[0].shape[1] >= 168
    refused(ValueError, ["num_replicas is 160", "12: 168"], lambda: aristos.rebalance_experts(weight, 160, 1, 1, 12))
    refused(ValueError, ["weight[0][0] is -1.0"], lambda: aristos.rebalance_experts(-weight, 168, 1, 1, 12))


CASES = [results_are_eplbs, shares_level_all_loads, few_experts_leave_the_placement_in_use, least_number_is_found]

if __name__ == "__main__":
    sys.exit(run_here([(f"balance::{case.__name__}", case) for case in CASES]))
