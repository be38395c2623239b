// The persistent kernels by TMA and wgmma in tiles of two blocks, which read weights once for both: for batches of many rows.
#define ARISTOS_PERSISTENT 1
#include "pass.h"
#include "path_hopper.h"

namespace aristos {
using namespace dev;

// One for each direction and element type: a kernel then has only the code it can need, and the registers of the worst of that.
CLUSTER_KERNEL(aristos_forward_hopper_256x256_bf16, hopper::THREADS)(const Layer* layer, Pass pass) {
    run_pass<HopperPath<Bf16, FORWARD_KINDS, 256, 2>>(*layer, pass);
}
REGISTER_CLUSTER_KERNEL(aristos_forward_hopper_256x256_bf16)

CLUSTER_KERNEL(aristos_forward_hopper_256x256_f16, hopper::THREADS)(const Layer* layer, Pass pass) {
    run_pass<HopperPath<F16, FORWARD_KINDS, 256, 2>>(*layer, pass);
}
REGISTER_CLUSTER_KERNEL(aristos_forward_hopper_256x256_f16)

CLUSTER_KERNEL(aristos_backward_hopper_256x256_bf16, hopper::THREADS)(const Layer* layer, Pass pass) {
    run_pass<HopperPath<Bf16, BACKWARD_KINDS, 256, 2>>(*layer, pass);
}
REGISTER_CLUSTER_KERNEL(aristos_backward_hopper_256x256_bf16)

CLUSTER_KERNEL(aristos_backward_hopper_256x256_f16, hopper::THREADS)(const Layer* layer, Pass pass) {
    run_pass<HopperPath<F16, BACKWARD_KINDS, 256, 2>>(*layer, pass);
}
REGISTER_CLUSTER_KERNEL(aristos_backward_hopper_256x256_f16)

}  // namespace aristos
