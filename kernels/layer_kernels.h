// The persistent kernels of a path: one per direction and dtype, so that unused code paths do not inflate register use.
#pragma once
#define ARISTOS_PERSISTENT 1
#include "pass.h"

#define LAYER_KERNEL(DECLARE, REGISTER, name, Path, T, KINDS, ...)                                       \
    DECLARE(name, __VA_ARGS__)(const Layer* layer, Pass pass) { run_pass<Path<T, KINDS>>(*layer, pass); } \
    REGISTER(name)

// DECLARE and REGISTER: KERNEL and REGISTER_KERNEL, or their cluster variants; the last arguments are DECLARE's launch bounds.
// `infix` is the path's part of the kernel names (launch.h).
#define LAYER_KERNELS(DECLARE, REGISTER, infix, Path, ...)                                                        \
    LAYER_KERNEL(DECLARE, REGISTER, aristos_forward##infix##_bf16, Path, Bf16, FORWARD_KINDS, __VA_ARGS__)   \
    LAYER_KERNEL(DECLARE, REGISTER, aristos_forward##infix##_f16, Path, F16, FORWARD_KINDS, __VA_ARGS__)     \
    LAYER_KERNEL(DECLARE, REGISTER, aristos_backward##infix##_bf16, Path, Bf16, BACKWARD_KINDS, __VA_ARGS__) \
    LAYER_KERNEL(DECLARE, REGISTER, aristos_backward##infix##_f16, Path, F16, BACKWARD_KINDS, __VA_ARGS__)
