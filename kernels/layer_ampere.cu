// The persistent kernels by mma.sync: sm_80 and later.
#define ARISTOS_PERSISTENT 1
#include "pass.h"
#include "path_ampere.h"

namespace aristos {
using namespace dev;

// One for each direction and element type: a kernel then has only the code it can need, and the registers of the worst of that.
KERNEL(aristos_forward_bf16, 256, 1)(const Layer* layer, Pass pass) {
    run_pass<AmperePath<Bf16, AmpereTile<128, 256>, FORWARD_KINDS>>(*layer, pass);
}
REGISTER_KERNEL(aristos_forward_bf16)

KERNEL(aristos_forward_f16, 256, 1)(const Layer* layer, Pass pass) {
    run_pass<AmperePath<F16, AmpereTile<128, 256>, FORWARD_KINDS>>(*layer, pass);
}
REGISTER_KERNEL(aristos_forward_f16)

KERNEL(aristos_backward_bf16, 256, 1)(const Layer* layer, Pass pass) {
    run_pass<AmperePath<Bf16, AmpereTile<128, 256>, BACKWARD_KINDS>>(*layer, pass);
}
REGISTER_KERNEL(aristos_backward_bf16)

KERNEL(aristos_backward_f16, 256, 1)(const Layer* layer, Pass pass) {
    run_pass<AmperePath<F16, AmpereTile<128, 256>, BACKWARD_KINDS>>(*layer, pass);
}
REGISTER_KERNEL(aristos_backward_f16)

}  // namespace aristos
