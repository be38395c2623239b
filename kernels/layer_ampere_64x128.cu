// The persistent kernels by mma.sync in small tiles, two blocks on a multiprocessor: for problems that are too few large ones.
#define ARISTOS_PERSISTENT 1
#include "pass.h"
#include "path_ampere.h"

namespace aristos {
using namespace dev;

// One for each direction and element type: a kernel then has only the code it can need, and the registers of the worst of that.
KERNEL(aristos_forward_64x128_bf16, 128, 2)(const Layer* layer, Pass pass) {
    run_pass<AmperePath<Bf16, AmpereTile<64, 128>, FORWARD_KINDS>>(*layer, pass);
}
REGISTER_KERNEL(aristos_forward_64x128_bf16)

KERNEL(aristos_forward_64x128_f16, 128, 2)(const Layer* layer, Pass pass) {
    run_pass<AmperePath<F16, AmpereTile<64, 128>, FORWARD_KINDS>>(*layer, pass);
}
REGISTER_KERNEL(aristos_forward_64x128_f16)

KERNEL(aristos_backward_64x128_bf16, 128, 2)(const Layer* layer, Pass pass) {
    run_pass<AmperePath<Bf16, AmpereTile<64, 128>, BACKWARD_KINDS>>(*layer, pass);
}
REGISTER_KERNEL(aristos_backward_64x128_bf16)

KERNEL(aristos_backward_64x128_f16, 128, 2)(const Layer* layer, Pass pass) {
    run_pass<AmperePath<F16, AmpereTile<64, 128>, BACKWARD_KINDS>>(*layer, pass);
}
REGISTER_KERNEL(aristos_backward_64x128_f16)

}  // namespace aristos
