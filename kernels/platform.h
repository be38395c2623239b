// The machine as kernels see it: threads, barriers, ordered memory accesses, asynchronous copies, tensor-core instructions and one-sided
// puts. Kernels include this file instead of CUDA headers, so that the same source runs on GPUs (platform_cuda.h) and on CPUs for tests
// (host/platform_host.h).
//
// A kernel is written
//     KERNEL(aristos_plan, 256, 1)(const Layer* layer, Pass pass) { ... }     // at most 256 threads, 1 block per SM
//     REGISTER_KERNEL(aristos_plan)
// inside `namespace aristos` after `using namespace dev;` (not globally, because CUDA and libc define their own ballot and pause), with
// at most 4 trivially copyable parameters. Every loop that spins on memory calls pause() in each iteration.
//
// ARISTOS_HOPPER is 1 if TMA, mbarriers and wgmma exist: with sm_90a (set on the command line) and on the host.
#pragma once
#include "params.h"

// Tests redefine this to inject faults, which their cases must detect. In production it is false.
#ifndef ARISTOS_FAULT
#define ARISTOS_FAULT(fault) false
#endif

namespace aristos {

// Storage types; arithmetic is in float.
struct Bf16 { u16 bits; };
struct F16 { u16 bits; };

// The widest load or store of one thread.
struct alignas(16) Vec16 { u32 w[4]; };

// A 2-D TMA map: opaque, built by the host.
struct alignas(64) TensorMap { u8 bytes[128]; };

}  // namespace aristos

#ifdef __CUDACC__
#include "platform_cuda.h"
#else
#include "host/platform_host.h"
#endif
