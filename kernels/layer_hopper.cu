// The persistent kernels by TMA and wgmma: sm_90a.
#define ARISTOS_PERSISTENT 1
#include "pass.h"
#include "path_hopper.h"

namespace aristos {
using namespace dev;

// One for each direction and element type: a kernel then has only the code it can need, and the registers of the worst of that.
KERNEL(aristos_forward_hopper_bf16, hopper::THREADS, 1)(const Layer* layer, Pass pass) {
    run_pass<HopperPath<Bf16, FORWARD_KINDS, 256>>(*layer, pass);
}
REGISTER_KERNEL(aristos_forward_hopper_bf16)

KERNEL(aristos_forward_hopper_f16, hopper::THREADS, 1)(const Layer* layer, Pass pass) {
    run_pass<HopperPath<F16, FORWARD_KINDS, 256>>(*layer, pass);
}
REGISTER_KERNEL(aristos_forward_hopper_f16)

KERNEL(aristos_backward_hopper_bf16, hopper::THREADS, 1)(const Layer* layer, Pass pass) {
    run_pass<HopperPath<Bf16, BACKWARD_KINDS, 256>>(*layer, pass);
}
REGISTER_KERNEL(aristos_backward_hopper_bf16)

KERNEL(aristos_backward_hopper_f16, hopper::THREADS, 1)(const Layer* layer, Pass pass) {
    run_pass<HopperPath<F16, BACKWARD_KINDS, 256>>(*layer, pass);
}
REGISTER_KERNEL(aristos_backward_hopper_f16)

}  // namespace aristos
