"""Adapters of PEFT on experts, compared with the unpatched model in one process, and families that transformers never lets us compute."""

import subprocess
import sys
import types
import unittest.mock

import torch
import torch.distributed as dist
from harness import full, refused, relative_error
from peft import LoraConfig, get_peft_model
from test_training import STEPS, Net, batches, everyone
from test_transformers import LENGTH, folder_of
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, JetMoeConfig, SwitchTransformersConfig
from transformers.distributed import DistributedConfig

import aristos

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# With gpt-oss and Mixtral: the other order of dimensions, and another name.
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss")


def adapted(model, **where):
    """The model with adapters whose products are not zero."""
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **where))


def loaded(family, **how):
    return AutoModelForCausalLM.from_pretrained(folder_of(family), dtype=torch.float32, **how)


def batch_of(n):
    return torch.randint(3, 32, (n, LENGTH), generator=torch.Generator().manual_seed(2))


def run(model, batch):
    """Returns the loss, and the gradients by name."""
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


def equal(got, want, limit=1e-5):
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    errors = {name: relative_error(got[name], want[name]) for name in want}
    worst = max(errors, key=errors.get)
    assert errors[worst] <= limit, f"{worst}: {errors[worst]}"
    return f"{len(errors)} gradients, {errors[worst]:.1e}"


def adapters_equal_eager(family, **where):
    """All experts in this process."""

    def case():
        batch, models = batch_of(2), []
        for how in ("eager", "aristos"):
            model = adapted(loaded(family, experts_implementation=how), **where)
            models.append((model, *run(model, batch)))
        (eager, want_loss, want), (model, loss, got) = models
        assert any("experts" in name for name in want) or "target_parameters" not in where
        assert relative_error(loss, want_loss) <= 1e-5
        said = equal(got, want)
        with torch.no_grad():
            with aristos.record_routing() as layers:
                logits = model(input_ids=batch).logits
            with aristos.replay_routing(layers):
                assert torch.equal(model(input_ids=batch).logits, logits)
            merged = model.merge_and_unload()(input_ids=batch).logits
            assert relative_error(merged, eager(input_ids=batch).logits) <= 1e-5
        return said

    return case


def distributed_adapters_equal_one_process():
    """The experts of a model of transformers are distributed, and the adapters are on all processes."""
    size, rank = dist.get_world_size(), dist.get_rank()
    batch, where = batch_of(2 * size), dict(target_modules=[], target_parameters=EXPERTS)
    eager = adapted(loaded("qwen3_moe", experts_implementation="eager"), **where)
    want_loss, want = run(eager, batch)
    split = DistributedConfig(ep_size=size, fsdp_size=size, ep_implementation="aristos")
    model = adapted(loaded("qwen3_moe", distributed_config=split), **where)
    mine = batch[2 * rank : 2 * rank + 2]
    loss, got = run(model, mine)
    for tensor in (loss, *got.values()):
        dist.all_reduce(tensor)
        tensor /= size
    assert relative_error(loss, want_loss) <= 1e-5, (loss, want_loss)
    said = equal(got, want)
    with torch.no_grad():
        merged, whole = model.merge_and_unload(), eager.merge_and_unload()
        error = relative_error(full(merged(input_ids=mine).logits), whole(input_ids=mine).logits)
        assert error <= 1e-5, error
    return said


def adapters_of_a_layer_train_under_ddp(mean_gradients):
    """Steps with an adapter on `aristos.MoE` equal those of one process. DDP makes the adapters of all processes equal."""
    where = dict(target_modules=["first"], target_parameters=["moe.gate_up_proj", "moe.down_proj"])

    def steps(net, wrap, x, seed):
        torch.manual_seed(seed)
        model = wrap(get_peft_model(net, LoraConfig(r=4, **where)))
        optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.5)
        for batch in x:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad}

    more = dict(aux_loss_coef=0.0, mean_gradients=mean_gradients)
    want = steps(Net(aristos.Group.alone(), **more), lambda model: model, batches().flatten(1, 2), 1)
    wrap = lambda model: DistributedDataParallel(aristos.exclude_experts(model))
    got = steps(Net(everyone(), **more), wrap, batches()[:, dist.get_rank()], 1 + dist.get_rank())
    assert any("moe" in name for name in want) and STEPS > 1
    return equal(got, want)


def families_that_are_never_called_are_refused():
    jetmoe = JetMoeConfig(vocab_size=32, hidden_size=32, num_hidden_layers=1, num_local_experts=4, intermediate_size=16, kv_channels=8)
    switch = SwitchTransformersConfig(vocab_size=32, d_model=32, d_kv=8, d_ff=16, num_layers=2, num_heads=4, num_experts=4)
    for auto, config, words in (
        (AutoModelForCausalLM, jetmoe, ["JetMoeForCausalLM has num_local_experts = 4", "never be called"]),
        (AutoModelForSeq2SeqLM, switch, ["SwitchTransformersForConditionalGeneration has num_experts = 4", "switch_transformers"]),
    ):
        refused(NotImplementedError, words, lambda: auto.from_config(config, experts_implementation="aristos"))
        auto.from_config(config, experts_implementation="eager")


def other_versions_of_libraries_are_left_alone():
    """Private functions of transformers and PEFT may be missing."""
    for missing in ("_check_and_adjust_experts_implementation", "_can_set_experts_implementation"):
        lines = f"""
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
del PreTrainedModel.{missing}
before = dict(vars(PreTrainedModel))
import aristos
assert dict(vars(PreTrainedModel)) == before and "aristos" in ALL_EXPERTS_FUNCTIONS
"""
        subprocess.run([sys.executable, "-c", lines], check=True)
    part = type("Part", (), {})
    aristos._peft._patch_if_known(types.SimpleNamespace(_LoraFactorsProxy=part, ParamWrapper=part))
    assert "forward" not in vars(part)
    finder = aristos._peft._Finder()
    with unittest.mock.patch.object(aristos._peft, "_LAYERS", "peft.missing"), unittest.mock.patch.object(sys, "meta_path", [finder, *sys.meta_path]):
        assert finder.find_spec("peft.missing", None) is None


# The number of processes of each case: one, several or any.
CASES = [
    (1, "all_linear", adapters_equal_eager("qwen3_moe", target_modules="all-linear")),
    *((1, f"experts_of_{family}", adapters_equal_eager(family, target_modules=[], target_parameters=EXPERTS)) for family in FAMILIES),
    (1, "families_that_are_never_called_are_refused", families_that_are_never_called_are_refused),
    (1, "other_versions_of_libraries_are_left_alone", other_versions_of_libraries_are_left_alone),
    (2, "distributed_adapters_equal_one_process", distributed_adapters_equal_one_process),
    (2, "adapters_of_a_layer_train_under_ddp", lambda: adapters_of_a_layer_train_under_ddp(False)),
    (2, "adapters_of_a_layer_with_means_train_under_ddp", lambda: adapters_of_a_layer_train_under_ddp(True)),
]


def cases(wanted, size):
    """Returns the cases for this number of processes as (name, function) pairs, or only the wanted case."""
    found = [(f"peft::{name}", case) for least, name, case in CASES if min(size, 2) == least and wanted in ("", name)]
    return found or sys.exit(f"no case peft:{wanted}")
