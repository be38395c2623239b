// The machine, as kernels see it: threads, barriers, ordered memory, asynchronous copies, tensor-core instructions, one-sided
// puts. A kernel includes this file and nothing of CUDA, so that the same source runs on a GPU (platform_cuda.h) and on a
// CPU (host/platform_host.h, where it is tested).
//
// A kernel is written
//     KERNEL(aristos_plan, 256, 1)(const Layer* layer, Pass pass) { ... }     // at most 256 threads, 1 block per SM
//     REGISTER_KERNEL(aristos_plan)
// inside `namespace aristos` after `using namespace dev;` (there, not globally: CUDA and libc define a ballot and a pause of
// their own), with at most 4 trivially copyable parameters. Every loop that spins on memory calls pause() in each iteration.
//
// ARISTOS_HOPPER is 1 where TMA, mbarriers and wgmma exist: with sm_90a (given on the compiler's line) and on the host.
#pragma once
#include "params.h"

// Where this stands tests plant faults, to see that their cases notice them. Elsewhere it is false.
#ifndef ARISTOS_FAULT
#define ARISTOS_FAULT(fault) false
#endif

namespace aristos {

// Elements as they lie in memory; arithmetic is in float.
struct Bf16 { u16 bits; };
struct F16 { u16 bits; };

// What one thread moves in one instruction.
struct alignas(16) Vec16 { u32 w[4]; };

// A 2-D TMA map: opaque, made by the host.
struct alignas(64) TensorMap { u8 bytes[128]; };

}  // namespace aristos

#ifdef __CUDACC__
#include "platform_cuda.h"
#else
#include "host/platform_host.h"
#endif
